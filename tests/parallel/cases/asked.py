"""Questions that users put to a compression at any time, on one rank alone or on all, and names of
collectives, which do not depend on them."""

import functools

import horovod.torch as hvd
import torch
from checks import assert_equal, raises, registry
from public_reads import READS
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import flat

CASES, case = registry()

SPEC = "dgc:ratio=0.1,min_numel=0"
# When a question comes. In the middle of a backward pass, and until its results are there, what
# needs the end of a step refuses.
MOMENTS = ("before the first step", "between steps", "in backward", "after backward", "brought")
REFUSING = dict.fromkeys(("in backward", "after backward"), {"record", "state_dict"})
ALL = {
    **{name: lambda compression, _, read=read: read(compression) for name, read in READS.items()},
    "compression_of": lambda _, optimizer: hvdc.compression_of(optimizer),
}


class Pair(nn.Module):
    """Two models in a row, with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 4)])

    def forward(self, x):
        return self.parts[1](torch.tanh(self.parts[0](x)))


class Asked:
    """Asks questions at one moment, on one rank. Keeps those that were refused."""

    def __init__(self, moment, rank, questions=tuple(ALL)):
        self.moment, self.rank, self.questions = moment, rank, questions
        self.refused = set()

    def at(self, moment, compression, optimizer):
        for question in self.questions if (moment, hvd.rank()) == (self.moment, self.rank) else ():
            try:
                ALL[question](compression, optimizer)
            except (RuntimeError, TypeError):
                self.refused.add(question)


def trained(make, asked, steps=3):
    """(parameters, states) after some steps of two optimizers, of which the first is asked."""
    torch.manual_seed(0)
    model = Pair()
    compressions, optimizers = zip(*(make(i, part) for i, part in enumerate(model.parts)))
    at = functools.partial(asked.at, compression=compressions[0], optimizer=optimizers[0])
    # The second model's gradients have come then, and the first one's come one by one.
    for param in model.parts[0].parameters():
        param.register_hook(lambda grad: at("in backward"))
    at("before the first step")
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, 12, generator=data)).square().mean().backward()
        at("after backward")
        for optimizer in optimizers:
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
        at("brought")
        for optimizer in optimizers:
            if hasattr(optimizer, "synchronize"):
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        at("between steps")
    bound = [hvdc.compression_of(each) or each.compression for each in optimizers]
    return flat(model), [each.state_dict()["tensors"] for each in bound]


def of_horovod(i, part, options, shared=None):
    compression = shared or hvdc.Compression.from_spec(SPEC, **options)
    named = [(f"{i}.{name}", param) for name, param in part.named_parameters()]
    optimizer = torch.optim.SGD(part.parameters(), 0.1, momentum=0.9)
    return compression, hvd.DistributedOptimizer(optimizer, named, compression)


def of_updates(i, part):
    optimizer = torch.optim.Adam(part.parameters(), 0.01)
    named = [(f"{i}.{name}", param) for name, param in part.named_parameters()]
    optimizer = hvdc.UpdateOptimizer(optimizer, named_parameters=named, compression=SPEC, every=2)
    return optimizer.compression, optimizer


@case(2)
def no_question_on_one_rank_hangs_or_changes_a_step():
    for make, refusing in (
        (functools.partial(of_horovod, options={}), REFUSING),
        (functools.partial(of_horovod, options={"discardable": True}), REFUSING),
        (of_updates, dict.fromkeys(MOMENTS, {"switch_at"})),
    ):
        unasked = trained(make, Asked("never", 0))
        # The first question binds.
        backwards = Asked(MOMENTS[0], 0, tuple(ALL)[::-1])
        for asked in (backwards, *(Asked(moment, 1 - i % 2) for i, moment in enumerate(MOMENTS))):
            found = trained(make, asked)
            assert torch.equal(found[0], unasked[0]), (make, asked.moment)
            assert_equal(found[1], unasked[1])
            refused = refusing.get(asked.moment, set()) if hvd.rank() == asked.rank else set()
            assert asked.refused == refused, (make, asked.moment, asked.refused)


@case(2)
def optimizers_and_compressions_of_one_rank_alone_do_not_part_the_ranks():
    """Twins in turn, of which a rank makes and keeps more than another; one compression for two
    optimizers."""
    kept, runs = [], []
    for turn in range(3):
        torch.manual_seed(0)
        part = nn.Linear(12, 4)
        if hvd.rank() == turn % 2:
            kept.append(of_horovod(0, nn.Linear(12, 4), {}))
            kept[-1][0].stats()
            kept.append(hvdc.Compression.topk(torch.optim.SGD(part.parameters(), 0.1)))
        compression, optimizer = of_horovod(0, part, {})
        for step in range(2):
            optimizer.zero_grad()
            part(torch.full((2, 12), 1.0 + hvd.rank() + step)).square().mean().backward()
            optimizer.step()
        if hvd.rank():
            kept.append(optimizer)
        runs.append(flat(part))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])

    shared = hvdc.Compression.from_spec(SPEC)
    make = functools.partial(of_horovod, options={}, shared=shared)
    asked = Asked(MOMENTS[0], 1)
    trained(make, asked)
    assert asked.refused == (
        set(READS) - {"repr", "hasattr", "attributes"} if hvd.rank() else set()
    )


@case(2)
def optimizers_that_step_in_another_order_are_named():
    """Bound ones, so that all ranks have made them in one order."""
    parts = nn.Linear(12, 16), nn.Linear(16, 4)
    optimizers = []
    for i, part in enumerate(parts):
        optimizer = torch.optim.SGD(part.parameters(), 0.1)
        named = [(f"{i}.{name}", param) for name, param in part.named_parameters()]
        compression = hvdc.Compression.from_spec(SPEC, optimizer, named_parameters=named)
        optimizers.append(hvd.DistributedOptimizer(optimizer, named, compression))
    first = hvd.rank()
    with raises(MismatchError, "tensors.0.weight", "missing on rank 1", "in one order"):
        parts[first](torch.ones(1, 12 + 4 * first)).sum().backward()
