"""Models of an elastic job that go on with other compressions: before a rank dies and after the
last commit, right before others join, and before one leaves."""

import horovod.torch as hvd
import torch
from elastic_training import KILLED_AT, loss_of, model_of

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


def made(hvdc):
    """The parts of the job's state."""
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
    return parts


def train_step(state):
    """Yields when the first model has sent something."""
    for when in WHEN:
        model, optimizer = state.__dict__[f"model_{when}"], state.__dict__[f"optimizer_{when}"]
        optimizer.zero_grad()
        loss_of(model, state.step, hvd.rank()).backward()
        if when == WHEN[0]:
            yield
        optimizer.step()


def switch_after(state):
    """What is called, after a step."""
    if state.step in SWITCHES:
        state.compression_called.switch(SWITCHES[state.step])


def saved(state):
    return [state.__dict__[f"model_{when}"].state_dict() for when in WHEN]
