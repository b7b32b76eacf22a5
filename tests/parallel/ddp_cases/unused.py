"""Parameters that are not used in each step, on one rank or on any."""

import itertools

import torch
import torch.distributed as dist
from checks import registry

from .options import told_model
from .told import assert_nothing_lost, told
from .training import assert_replicas_identical

CASES, case = registry()


def chosen(step, rank):
    """The gradients of a step in which no rank uses "matrix" every other time, and others one rank
    only."""
    its = told(rank, step)
    if step % 2:
        del its["matrix"]
    if (step + rank) % 3 == 0:
        del its["wide"]
    return its


@case(2, 3)
def nothing_is_lost_of_parameters_that_no_rank_uses():
    for options in ({}, {"gradient_as_bucket_view": True}):
        for set_to_none in (True, False):
            for spec in ("topk:ratio=0.05,min_numel=0", "maxnorm", "none"):
                options = {"find_unused_parameters": True, **options}
                model, optimizer, compression = told_model(spec, options=options)
                gradients = []
                for step in range(8):
                    optimizer.zero_grad(set_to_none=set_to_none)
                    gradients.append(chosen(step, dist.get_rank()))
                    model(gradients[-1]).backward()
                    optimizer.step()
                assert_replicas_identical(model)
                if spec != "maxnorm":
                    assert_nothing_lost(model, compression, gradients)


@case(2, 3)
def what_no_rank_uses_stays_where_it_is():
    algorithms = ["topk:ratio=0.05,min_numel=0", "adacomp:min_numel=0", "powersgd:min_numel=0"]

    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)

    def adam(model):
        return torch.optim.AdamW(model.parameters(), 0.1)

    rank, options = dist.get_rank(), {"find_unused_parameters": True}
    for spec, optimizer in (
        *itertools.product(algorithms, (sgd, adam)),
        ("dgc:ratio=0.05,min_numel=0", sgd),
    ):
        model, made, compression = told_model(spec, optimizer, options)
        param = model.module.held["matrix"]
        for step in range(9):
            its = told(rank, step)
            if 3 <= step < 7:
                del its["matrix"]
            elif step == 8 and rank:
                # One rank uses it again.
                del its["matrix"]
            before = param.detach().clone(), compression.state_dict()["tensors"]["held.matrix"]
            made.zero_grad()
            model(its).backward()
            made.step()
            after = param.detach(), compression.state_dict()["tensors"]["held.matrix"]
            stays = torch.equal(before[0], after[0])
            assert stays == (3 <= step < 7), f"{spec}: step {step}"
            if stays:
                assert all(torch.equal(before[1][key], after[1][key]) for key in after[1]), spec
        assert_replicas_identical(model)


@case(2)
def a_parameter_that_is_frozen_stays_where_it_is():
    options = {"find_unused_parameters": True}
    model, optimizer, _ = told_model("topk:ratio=0.05,min_numel=0", options=options)
    for step in range(4):
        if step == 2:
            param = model.module.held["matrix"].requires_grad_(False)
            before = param.clone()
        optimizer.zero_grad()
        model(told(dist.get_rank(), step)).backward()
        optimizer.step()
    assert torch.equal(param, before)
    assert_replicas_identical(model)


@case(2)
def a_static_graph_with_a_parameter_that_is_never_used():
    for spec in ("topk:ratio=0.05,min_numel=0", "none"):
        model, optimizer, compression = told_model(spec, options={"static_graph": True})
        gradients = []
        for step in range(6):
            optimizer.zero_grad()
            its = told(dist.get_rank(), step)
            del its["matrix"]
            gradients.append(its)
            model(its).backward()
            optimizer.step()
        assert_replicas_identical(model)
        assert_nothing_lost(model, compression, gradients)
