"""One rank of an elastic job, as a user would write it, with a model for each compression: it dies,
asks for other hosts, and goes on.

Each rank writes to FOLDER what happens to it, a line of JSON each. test_elastic.py starts the job
and replays what was written.
"""

import os
import pathlib
import signal
import sys

import horovod.torch as hvd
import torch
from elastic_jobs import on_the_host_that_dies, tell, wait_for_hosts
from torch import nn

SPECS = (
    "dgc:ratio=0.001",
    "adacomp",
    "variance:error_feedback=true",
    "powersgd:rank=1,min_rate=1",
    "topk:ratio=0.01,exchange=split",
)
SPECS = tuple(f"{spec},min_numel=100" if ":" in spec else f"{spec}:min_numel=100" for spec in SPECS)
# The one whose loss a GradScaler scales.
SCALED = 1
# The one that finds its optimizer by itself.
UNBOUND = 0
STEPS, COMMITTED_EVERY, KILLED_AT = 100, 4, 50
RANKS = {66: (1, 0, 1), 80: (1, 0, 2), 92: (1, 0, 1)}  # by step, on each host


def model_of(spec):
    torch.manual_seed(len(spec))
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 6))


def optimizer_of(spec, model, momentum=0.9):
    return torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.0 if "dgc" in spec else 1e-3
    )


def loss_of(model, step, rank):
    """Of the batch of one rank, which is known to all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 24, generator=generator), torch.randint(0, 6, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def main(folder):
    import horovod_compress.torch as hvdc

    torch.set_num_threads(1)
    hvd.init()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=9)
    parts = {"scaler": scaler}
    for i, spec in enumerate(SPECS):
        model = model_of(spec)
        optimizer = optimizer_of(spec, model)
        bound = () if i == UNBOUND else (optimizer, model.named_parameters())
        compression = hvdc.Compression.from_spec(
            spec, *bound, grad_scaler=scaler if i == SCALED else None
        )
        named = [(f"{i}.{name}", param) for name, param in model.named_parameters()]
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        parts.update(
            {f"model_{i}": model, f"optimizer_{i}": wrapped, f"compression_{i}": compression}
        )
    state = hvd.elastic.TorchState(**parts, step=0)

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        while state.step < STEPS:
            train_step(state, state.step == KILLED_AT and on_the_host_that_dies(folder))
            state.step += 1
            if state.step % COMMITTED_EVERY == 0:
                state.commit()
            if state.step in RANKS:
                save(state, folder)
                wait_for_hosts(state, folder, hvd, RANKS[state.step])

    train(state)
    save(state, folder)


def train_step(state, last):
    for i in range(len(SPECS)):
        model, optimizer = state.__dict__[f"model_{i}"], state.__dict__[f"optimizer_{i}"]
        optimizer.zero_grad()
        loss = loss_of(model, state.step, hvd.rank())
        (state.scaler.scale(loss) if i == SCALED else loss).backward()
        if last and i == 2:
            # Two models are a step ahead of the others, and a third one has sent something.
            os.kill(os.getpid(), signal.SIGKILL)
        if i == SCALED:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                state.scaler.step(optimizer)
            state.scaler.update()
        else:
            optimizer.step()


def save(state, folder):
    models = [state.__dict__[f"model_{i}"].state_dict() for i in range(len(SPECS))]
    torch.save(models, folder / f"{state.step}.{hvd.rank()}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
