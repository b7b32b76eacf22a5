"""Models of an elastic job whose UpdateOptimizers exchange each rank's own updates of Adam: a rank
dies between two commits, others join and leave, some of it within rounds of several local steps."""

import copy
import os
import signal

import horovod.torch as hvd
import torch
from elastic_training import loss_of, model_of

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


def made(hvdc):
    """The parts of the job's state."""
    parts = {}
    for i, (spec, every) in enumerate(EVERY.items()):
        model = model_of(spec)
        parts[f"updated_{i}"] = model
        parts[f"updates_{i}"] = hvdc.UpdateOptimizer(
            optimizer_of(model),
            named_parameters=model.named_parameters(),
            compression=spec,
            every=every,
            outer=hvdc.Nesterov(*OUTER) if every > 1 else None,
        )
    return parts


def train_step(state, dies):
    """dies: between the backward pass and the exchange of the second model, the first being a step
    ahead."""
    for i in range(len(EVERY)):
        model, optimizer = state.__dict__[f"updated_{i}"], state.__dict__[f"updates_{i}"]
        optimizer.zero_grad()
        loss_of(model, state.step, hvd.rank()).backward()
        if dies and i == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


def saved(state):
    """What ranks share."""
    models = []
    for i in range(len(EVERY)):
        with state.__dict__[f"updates_{i}"].shared_parameters():
            models.append(copy.deepcopy(state.__dict__[f"updated_{i}"].state_dict()))
    return models
