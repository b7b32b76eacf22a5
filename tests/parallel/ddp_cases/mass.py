"""What was applied and what is held back make up the mean of all gradients, whatever DDP does."""

import contextlib

import torch
import torch.distributed as dist
from checks import registry
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp

from .options import SPARSE, told_model
from .told import Holder, assert_nothing_lost, told
from .training import assert_replicas_identical

CASES, case = registry()
SPECS = (SPARSE, "maxnorm:bits=16,ratio=0.1,min_numel=0", "adacomp:min_numel=0")


@case(2, 3)
def nothing_is_lost_of_passes_in_no_sync():
    rank = dist.get_rank()
    for spec in SPECS:
        model, optimizer, compression = told_model(spec)
        gradients = []
        for step in range(6):
            passes = [told(rank, 10 * step + number) for number in range(3)]
            optimizer.zero_grad()
            with model.no_sync():
                for its in passes[:-1]:
                    model(its).backward()
            model(passes[-1]).backward()
            optimizer.step()
            gradients += passes
        assert_replicas_identical(model)
        assert_nothing_lost(model, compression, gradients)


@case(2, 3)
def nothing_is_lost_of_all_together():
    """Parameters that one rank has used or none, passes in no_sync, steps that a GradScaler skips,
    and ranks that join."""
    rank, gradients = dist.get_rank(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    options = {"find_unused_parameters": True}
    model, optimizer, compression = told_model(options=options, grad_scaler=scaler)
    with model.join():
        for step in range(8 + 2 * rank):
            first, last = told(rank, 2 * step), told(rank, 2 * step + 1)
            if step % 2:
                for its in (first, last):
                    del its["matrix"]
            if (step + rank) % 3 == 0:
                del first["wide"], last["wide"]
            skipped = step in (2, 5)
            if skipped and rank == 1:
                last["kernel"][0, 0, 0, 0] = float("inf")
            if not skipped:
                gradients += [first, last]
            optimizer.zero_grad()
            for its, context in ((first, model.no_sync()), (last, contextlib.nullcontext())):
                with context:
                    scaler.scale(model(its)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_replicas_identical(model)
    assert compression.stats()["steps_undone"] == 2
    assert_nothing_lost(model, compression, gradients)


@case(2)
def nothing_counts_twice_where_one_of_two_optimizers_overflows():
    """The one that was given, and another one, each under the same GradScaler."""
    for place in ("matrix", "wide"):
        scaler, gradients = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
        model = DDP(Holder(), bucket_cap_mb=0.01)
        held = dict(model.module.held)
        first = torch.optim.SGD([held.pop("matrix")], lr=1.0)
        second = torch.optim.SGD(held.values(), lr=1.0)
        compression = ddp.compress(model, first, SPARSE, grad_scaler=scaler)
        for step in range(6):
            its, skipped = told(dist.get_rank(), step), step in (2, 4)
            if not skipped:
                gradients.append({name: gradient.clone() for name, gradient in its.items()})
            elif dist.get_rank():
                its[place].view(-1)[0] = float("inf")
            model.zero_grad()
            scaler.scale(model(its)).backward()
            scaler.step(first)
            scaler.step(second)
            scaler.update()
        assert_replicas_identical(model)
        assert_nothing_lost(model, compression, gradients)
