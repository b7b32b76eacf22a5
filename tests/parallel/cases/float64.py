"""Gradients and parameters of float64."""

import warnings

import horovod.torch as hvd
import torch
from checks import registry
from torch import nn

import horovod_compress.torch as hvdc

CASES, case = registry()
SIZES = [1e-300, 1e-60, 1.0, 1 + 1e-12, 1e60, 1e300]


def model_of():
    """Two matrices, of which one has a gradient that is not contiguous."""
    return nn.ParameterDict(
        {name: nn.Parameter(torch.ones(6, 4, dtype=torch.float64)) for name in ("plain", "turned")}
    )


def gradients():
    """Rank 1's are three times rank 0's, so the mean is twice those."""
    return (
        torch.tensor(SIZES, dtype=torch.float64)[:, None]
        * torch.arange(1, 5, dtype=torch.float64)
        * (1 + 2 * hvd.rank())
    )


def stepped(model, optimizer):
    """Takes a step, and returns what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            gradient = gradients()
            (
                (model["plain"] * gradient).sum()
                + (model["turned"].T * gradient.T.contiguous()).sum()
            ).backward()
            optimizer.step()
    return [str(each.message) for each in said if "float64" in str(each.message)]


@case(2)
def none_carries_float64_as_it_is():
    """Gradients and updates, and what is switched to it; recorded, too."""
    expected = (
        2
        * 1.0
        * torch.tensor(SIZES, dtype=torch.float64)[:, None]
        * torch.arange(1, 5, dtype=torch.float64)
    )
    for wrapping in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
        model, records = model_of(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        compression = hvdc.Compression.none(optimizer, named_parameters=model.named_parameters())
        compression.record(records.append, every=1)
        wrapped = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression, **wrapping
        )
        assert not stepped(model, wrapped)
        times = 2 if "op" in wrapping else 1
        for param in model.values():
            torch.testing.assert_close(param.detach(), 1 - times * expected, rtol=1e-14, atol=0)
        assert compression.stats()["steps_undone"] == 0 and records[0]["gradient_norm"] is None
    for outer in (None, hvdc.Nesterov(lr=1.0, momentum=0.0)):
        model = model_of()
        optimizer = hvdc.UpdateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=model.named_parameters(),
            compression="none",
            outer=outer,
        )
        assert not stepped(model, optimizer)
        for param in model.values():
            torch.testing.assert_close(param.detach(), 1 - expected, rtol=1e-14, atol=0)


@case(2)
def numbers_that_float32_has_not_are_warned_of_once():
    """By each compression, and updates leave parameters the digits that they have."""
    warned = "topk:ratio=1,min_numel=0", "fp16", "maxnorm:min_numel=0", "efsignsgd:min_numel=0"
    for spec in warned:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=model.named_parameters()
        )
        said = stepped(
            model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        )
        assert len(said) == 1 and "or use none" in said[0], (spec, said)
    model = model_of()
    optimizer = hvdc.UpdateOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-60),
        named_parameters=model.named_parameters(),
        compression="topk:min_numel=0",
    )
    assert len(stepped(model, optimizer)) == 1
    model = nn.ParameterDict(
        {"held": nn.Parameter(torch.full((64, 64), 1 + 1e-12, dtype=torch.float64))}
    )
    optimizer = hvdc.UpdateOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression="topk:min_numel=0",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["held"].sum().backward()
        model["held"].grad[1:] = 0
        optimizer.step()
    assert torch.equal(
        model["held"][1:].detach(), torch.full((63, 64), 1 + 1e-12, dtype=torch.float64)
    )
