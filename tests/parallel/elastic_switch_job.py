"""One rank of an elastic job that goes on with other compressions: before a rank dies and after the
last commit, right before others join, and before one leaves. test_elastic.py starts it and replays
what was written."""

import os
import pathlib
import signal
import sys

import horovod.torch as hvd
import torch
from elastic_job import COMMITTED_EVERY, KILLED_AT, RANKS, STEPS, loss_of, model_of
from elastic_jobs import on_the_host_that_dies, tell, wait_for_hosts

FIRST = "topk:ratio=0.01,min_numel=100"
SWITCHES = {
    20: "dgc:ratio=0.01,min_numel=100",
    KILLED_AT - 1: "none",
    60: "adacomp:min_numel=100",
    72: "dgc:ratio=0.02,min_numel=100",
    80: "none",
    86: "topk:ratio=0.02,min_numel=100",
}  # by step
# A model for each: after a step, and at a step that was named when training began.
WHEN = ("called", "planned")


def main(folder):
    import horovod_compress.torch as hvdc

    torch.set_num_threads(1)
    hvd.init()
    parts = {}
    for when in WHEN:
        model = model_of(when)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        compression = hvdc.Compression.none(optimizer, named_parameters=model.named_parameters())
        # Ranks that join do so while the others wait in sync().
        compression.switch(FIRST)
        named = [(f"{when}.{name}", param) for name, param in model.named_parameters()]
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        parts.update(
            {
                f"model_{when}": model,
                f"optimizer_{when}": wrapped,
                f"compression_{when}": compression,
            }
        )
    for step, spec in SWITCHES.items():
        parts["compression_planned"].switch(spec, at=step)
    state = hvd.elastic.TorchState(**parts, step=0)

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        while state.step < STEPS:
            train_step(state, state.step == KILLED_AT and on_the_host_that_dies(folder))
            state.step += 1
            if state.step in SWITCHES:
                state.compression_called.switch(SWITCHES[state.step])
            if state.step % COMMITTED_EVERY == 0:
                state.commit()
            if state.step in RANKS:
                wait_for_hosts(state, folder, hvd, RANKS[state.step])

    train(state)
    torch.save(
        [state.__dict__[f"model_{when}"].state_dict() for when in WHEN],
        folder / f"{state.step}.{hvd.rank()}.pt",
    )


def train_step(state, last):
    for when in WHEN:
        model, optimizer = state.__dict__[f"model_{when}"], state.__dict__[f"optimizer_{when}"]
        optimizer.zero_grad()
        loss_of(model, state.step, hvd.rank()).backward()
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
