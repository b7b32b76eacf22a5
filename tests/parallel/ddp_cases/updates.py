"""Optimizers whose updates are exchanged, in place of gradients."""

import torch
import torch.distributed as dist
from checks import raises, registry
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import MismatchError, available, ddp

from .states import copied
from .training import (
    assert_close,
    assert_replicas_identical,
    batches,
    flat,
    model_of,
    sgd,
    train,
    wrapped,
)

CASES, case = registry()


class Plain(torch.nn.Sequential):
    """Without batch norm, whose statistics are each rank's own here."""

    def __init__(self):
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(192, 60), torch.nn.ReLU(), torch.nn.Linear(60, 10)
        )


def updating(spec, optimizer=sgd, **options):
    model = model_of(Plain)
    made = ddp.UpdateOptimizer(
        optimizer(model), named_parameters=model.named_parameters(), compression=spec, **options
    )
    return model, made


@case(2, 3)
def dense_updates_train_as_plain_ddp_does():
    plain, its, _ = wrapped(None, model_of(Plain))
    model, optimizer = updating("none")
    for each, step in ((plain, its), (model, optimizer)):
        train(each, step, batches(6))
    assert_close(model, plain)
    assert_replicas_identical(model)


@case(2, 3)
def every_algorithm_keeps_replicas_alike_on_updates():
    adams = (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda model: ddp.AdamW(model.parameters(), lr=1e-3),
    )
    for number, spec in enumerate(available()):
        model, optimizer = updating(spec, adams[number % 2])
        train(model, optimizer, batches(3))
        assert_replicas_identical(model)
        assert optimizer.compression.stats()["steps"] >= 2


@case(2, 3)
def rounds_are_saved_and_loaded_in_their_middle():
    options = {"every": 3, "outer": ddp.Nesterov()}
    model, optimizer = updating("topk:ratio=0.05", **options)
    data = list(batches(12))
    train(model, optimizer, data[:7])
    saved = copied([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, data[7:])
    assert_replicas_identical(model)
    again, its = updating("topk:ratio=0.05", **options)
    again.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    train(again, its, data[7:])
    assert torch.equal(flat(again), flat(model))
    its.switch("none")
    its.average_state()
    train(again, its, data[:3])
    assert_replicas_identical(again)
    # As optimizers of 8 bits keep them.
    moments = next(iter(its.state.values()))
    name, tensor = next((n, t) for n, t in moments.items() if torch.is_tensor(t) and t.dim())
    moments[name] = tensor.as_subclass(type("Narrow", (torch.Tensor,), {}))
    with raises(TypeError, f"{name} is a Narrow", "save state_dict()"):
        its.average_state()


@case(2)
def what_an_update_optimizer_refuses():
    rank = dist.get_rank()
    model, optimizer = updating(
        "topk", optimizer=lambda model: torch.optim.Adam(model.parameters())
    )
    with torch.no_grad():
        model[1].bias += rank
    with raises(MismatchError, "parameters.1.bias", "broadcast"):
        train(model, optimizer, batches(1))
    model, optimizer = updating("topk")
    with raises(ValueError, "DistributedDataParallel", "ddp.compress"):
        train(DDP(model), optimizer, batches(1))
    with raises(ValueError, "transport=mpi"):
        updating("topk:transport=mpi")
    alone, _ = dist.new_subgroups(1)
    with raises(ValueError, "ddp.AdamW", "process group", "ranks=1"):
        updating("topk", lambda model: ddp.AdamW(model.parameters()), process_group=alone)
    with raises(ValueError, "LBFGS"):
        updating("topk", lambda model: torch.optim.LBFGS(model.parameters()))
