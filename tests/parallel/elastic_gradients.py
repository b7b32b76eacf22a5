"""Models of an elastic job whose gradients are compressed, one for each compression."""

import horovod.torch as hvd
import torch
from elastic_training import loss_of, model_of

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


def optimizer_of(spec, model, momentum=0.9):
    return torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.0 if "dgc" in spec else 1e-3
    )


def made(hvdc):
    """The parts of the job's state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=9)
    parts = {"scaler": scaler}
    for i, spec in enumerate(SPECS):
        model = model_of(spec)
        optimizer = optimizer_of(spec, model)
        parameters = None if i == UNBOUND else model.named_parameters()
        compression = hvdc.Compression.from_spec(
            spec,
            None if i == UNBOUND else optimizer,
            named_parameters=parameters,
            grad_scaler=scaler if i == SCALED else None,
        )
        named = [(f"{i}.{name}", param) for name, param in model.named_parameters()]
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        parts.update(
            {f"model_{i}": model, f"optimizer_{i}": wrapped, f"compression_{i}": compression}
        )
    return parts


def train_step(state):
    """Yields when some models are a step ahead of others, and one has sent something."""
    for i in range(len(SPECS)):
        model, optimizer = state.__dict__[f"model_{i}"], state.__dict__[f"optimizer_{i}"]
        optimizer.zero_grad()
        loss = loss_of(model, state.step, hvd.rank())
        (state.scaler.scale(loss) if i == SCALED else loss).backward()
        if i == 2:
            yield
        if i == SCALED:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                state.scaler.step(optimizer)
            state.scaler.update()
        else:
            optimizer.step()


def saved(state):
    return [state.__dict__[f"model_{i}"].state_dict() for i in range(len(SPECS))]
