"""One rank of an elastic job whose UpdateOptimizers exchange each rank's own updates of Adam: a
rank dies between two commits, others join and leave, some of it within rounds of several local
steps. test_elastic_updates.py starts it and replays what was written."""

import copy
import os
import pathlib
import signal
import sys

import horovod.torch as hvd
import torch
from elastic_job import COMMITTED_EVERY, KILLED_AT, RANKS, STEPS, loss_of, model_of
from elastic_jobs import on_the_host_that_dies, tell, wait_for_hosts

# Local steps, by spec.
EVERY = {
    "topk:ratio=0.02,min_numel=100": 1,
    "powersgd:rank=1,min_rate=1": 1,
    "topk:ratio=0.05,min_numel=100": 5,
}
# Learning rate and momentum, where there are several.
OUTER = 0.7, 0.8


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def main(folder):
    import horovod_compress.torch as hvdc

    torch.set_num_threads(1)
    hvd.init()
    parts = {}
    for i, (spec, every) in enumerate(EVERY.items()):
        model = model_of(spec)
        outer = hvdc.Nesterov(*OUTER) if every > 1 else None
        optimizer = hvdc.UpdateOptimizer(
            optimizer_of(model),
            named_parameters=model.named_parameters(),
            compression=spec,
            every=every,
            outer=outer,
        )
        parts.update({f"model_{i}": model, f"optimizer_{i}": optimizer})
    state = hvd.elastic.TorchState(**parts, step=0)

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        while state.step < STEPS:
            for i in range(len(EVERY)):
                model, optimizer = state.__dict__[f"model_{i}"], state.__dict__[f"optimizer_{i}"]
                optimizer.zero_grad()
                loss_of(model, state.step, hvd.rank()).backward()
                if i and state.step == KILLED_AT and on_the_host_that_dies(folder):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
            state.step += 1
            if state.step % COMMITTED_EVERY == 0:
                state.commit()
            if state.step in RANKS:
                save(state, folder)
                wait_for_hosts(state, folder, hvd, RANKS[state.step])

    train(state)
    save(state, folder)


def save(state, folder):
    """What ranks share."""
    models = []
    for i in range(len(EVERY)):
        with state.__dict__[f"optimizer_{i}"].shared_parameters():
            models.append(copy.deepcopy(state.__dict__[f"model_{i}"].state_dict()))
    torch.save(models, folder / f"{state.step}.{hvd.rank()}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
