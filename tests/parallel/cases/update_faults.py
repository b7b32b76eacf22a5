"""What goes wrong around hvdc.UpdateOptimizer: steps that fail, ranks that differ, states at the
wrong time."""

import copy
import warnings

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import assert_replicas_identical, batches, flat, model_of, sgd, train
from .updates import of_updates

CASES, case = registry()


@case(2)
def optimizers_of_parts_of_a_model():
    """Each is given all names, one parameter has two, and one of the optimizers has loaded a state
    by itself."""
    for every in (1, 2):
        parts, whole = model_of(), model_of()
        names = [*parts.named_parameters(), ("again", parts.out.weight)]
        inner = torch.optim.AdamW(parts.out.parameters(), lr=1.0)
        optimizers = [
            hvdc.UpdateOptimizer(each, named_parameters=names, compression="none", every=every)
            for each in (inner, torch.optim.AdamW(parts.shared.parameters(), lr=0.01))
        ]
        inner.load_state_dict(torch.optim.AdamW(parts.out.parameters()).state_dict())
        optimizers[0].param_groups[0]["lr"] = 0.01
        together = of_updates(
            whole,
            torch.optim.AdamW([*whole.out.parameters(), *whole.shared.parameters()], lr=0.01),
            "none",
            every=every,
        )
        for x, y in batches(4):
            for model, its in ((parts, optimizers), (whole, [together])):
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                for optimizer in its:
                    optimizer.step()
        assert torch.equal(flat(parts), flat(whole))
        assert_replicas_identical(parts)
        assert optimizers[0].compression.stats()["dense_bytes"] == 650 * 4 * 4 // every


@case(2)
def states_and_steps_within_shared_parameters():
    def start():
        model = model_of()
        return model, of_updates(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), every=4, outer=hvdc.Nesterov()
        )

    model, optimizer = start()
    train(model, optimizer, batches(6))
    with optimizer.shared_parameters():
        shared = flat(model)
        with optimizer.shared_parameters():
            assert torch.equal(flat(model), shared)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(portable=True)))
        for refused in (
            optimizer.step,
            optimizer.take_part,
            lambda: optimizer.load_state_dict(saved[1]),
        ):
            with raises(RuntimeError, "optimizer.shared_parameters()"):
                refused()
    assert not torch.equal(flat(model), shared) and optimizer.local_steps == 2
    again, its_optimizer = start()
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    assert torch.equal(flat(again), shared) and its_optimizer.local_steps == 0
    train(again, its_optimizer, batches(4))
    assert_replicas_identical(again)
    groups = saved[1]["param_groups"]
    kept = flat_state(optimizer)
    with raises(ValueError, "parameter groups"):
        optimizer.load_state_dict({**saved[1], "param_groups": [*groups, *groups]})
    assert torch.equal(flat_state(optimizer), kept)


def flat_state(optimizer):
    """What is not sent yet on this rank."""
    tensors = optimizer.state_dict()["updates"]["compression"]["tensors"]
    return torch.cat([array.flatten() for arrays in tensors.values() for array in arrays.values()])


class FourInOne(torch.optim.SGD):
    """Takes four steps in one, each with a closure's gradients; it switches none of them on."""

    def step(self, closure):
        for _ in range(4):
            loss = closure()
            super().step()
        return loss


@case(2)
def a_step_that_fails_leaves_what_ranks_share():
    """The optimizer has moved the parameters when its closure fails, on one rank."""
    model = model_of()
    optimizer = of_updates(model, FourInOne(model.parameters(), lr=0.05), "none")
    x, y = next(batches(1))
    before, calls = flat(model), []

    def closure():
        calls.append(None)
        if len(calls) == 3 and hvd.rank() == 1:
            assert not torch.equal(flat(model), before)
            raise KeyError("no such sample")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if hvd.rank() == 0:
        optimizer.step(closure)
    else:
        with raises(KeyError, "no such sample"):
            optimizer.step(closure)
        assert torch.equal(flat(model), before)
        optimizer.take_part()
    assert_replicas_identical(model)
    assert not torch.equal(flat(model), before)


@case(2)
def moments_that_are_not_finite_or_not_there():
    model = model_of().to(torch.bfloat16)  # which Horovod does not broadcast
    optimizer = hvdc.UpdateOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        every=2,
    )
    data = [(x.bfloat16(), y) for x, y in batches(4)]
    if hvd.rank() == 0:
        train(model, optimizer, data[:2])
    else:
        optimizer.take_part()
    with raises(MismatchError, "conv.weight.exp_avg", "call average_state() later"):
        optimizer.average_state()
    train(model, optimizer, data)
    optimizer.average_state()
    moment = optimizer.state[model.out.weight]["exp_avg"].float()
    assert moment.any() and torch.equal(
        moment, hvd.allreduce(moment, name="moment in half precision")
    )
    before = flat(model)
    if hvd.rank() == 1:
        optimizer.state[model.out.weight]["exp_avg"][0, 0] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, data)
    told = [
        each
        for each in caught
        if "rank 1's optimizer holds numbers that are not finite" in str(each.message)
    ]
    assert len(told) == (hvd.rank() == 1) and torch.equal(flat(model), before)


@case(2)
def a_state_that_one_rank_has_loaded():
    """In the middle of a round, where that rank would not begin one."""
    model = model_of()
    optimizer = of_updates(model, sgd(model), every=2)
    train(model, optimizer, batches(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = of_updates(model, sgd(model), every=2)
    if hvd.rank() == 0:
        model.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with raises(MismatchError, "Start all ranks alike"):
        train(model, again, batches(1))


@case(2)
def a_state_that_comes_with_other_parameters():
    """In the middle of training, where one rank has not loaded the model's."""
    model = model_of()
    optimizer = of_updates(model, sgd(model))
    train(model, optimizer, batches(1))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, batches(1))
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    train(model, optimizer, batches(1))
    optimizer.load_state_dict(saved[1])
    if hvd.rank() == 0:
        model.load_state_dict(saved[0])
    with raises(MismatchError, "parameters.", "before the first step"):
        train(model, optimizer, batches(1))


@case(1)
def one_rank_trains_as_if_alone():
    model, plain = model_of(), model_of()
    optimizer = of_updates(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train(model, optimizer, batches(5))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), batches(5))
    assert torch.equal(flat(model), flat(plain))
    optimizer.average_state()
    optimizer.load_state_dict(optimizer.state_dict(portable=True))


@case(2)
def thawed_in_the_middle_of_a_round():
    model = model_of()
    optimizer = of_updates(model, sgd(model), every=4)
    train(model, optimizer, batches(2))
    model.frozen.requires_grad_(True)
    frozen = model.frozen.weight.clone()
    with raises(ValueError, "make a new one for them"):
        train(model, optimizer, batches(1))
    assert torch.equal(model.frozen.weight, frozen)
