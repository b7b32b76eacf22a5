"""hvdc.UpdateOptimizer: what ranks would add to the parameters is compressed and exchanged, in
place of gradients."""

import copy
import functools
import io

import alike
import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import (
    Net,
    assert_close,
    assert_replicas_identical,
    batches,
    flat,
    model_of,
    sgd,
    train,
)

CASES, case = registry()
SHAPES = {"bias": (60,), "matrix": (40, 60)}  # in the order of a ParameterDict


def of_updates(model, optimizer, compression="topk:ratio=0.05,min_numel=0", **options):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvdc.UpdateOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )


def weights():
    return nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    )


def told(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def step_with(model, optimizer, gradients):
    """A step with gradients that do not depend on the parameters."""
    optimizer.zero_grad()
    sum((model[name] * gradient).sum() for name, gradient in gradients.items()).backward()
    optimizer.step()


def not_sent(optimizer):
    """The mean over ranks of what exchanges are still to bring, all tensors in one."""
    exchange = optimizer.compression._session.exchange
    exchange.arrays()
    parts = [tensor.residual for tensor in exchange.tensors]
    mine = [
        np.zeros(tensor.numel, np.float32) if part is None else np.asarray(part)
        for part, tensor in zip(parts, exchange.tensors)
    ]
    return hvd.allreduce(torch.from_numpy(np.concatenate(mine)), name="not sent")


@case(1, 2, 3)
def dense_updates_train_as_plain_horovod_does():
    """SGD's update is linear in gradients, with momentum, too."""
    for options in (
        {"momentum": 0},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True},
    ):
        plain, model = model_of(), model_of()
        train(
            plain,
            hvd.DistributedOptimizer(sgd(plain, **options), plain.named_parameters()),
            batches(10),
        )
        train(model, of_updates(model, sgd(model, **options), "none"), batches(10))
        assert_close(model, plain)
        assert_replicas_identical(model)


def adams_updates(gradients, lr, betas=(0.9, 0.999), eps=1e-8, ranks=1):
    """Adam's updates for a series of gradients, in NumPy (Kingma and Ba 2015, Algorithm 1). ranks:
    those of hvdc.AdamW, with as many."""
    for t, (m, w) in enumerate(alike.adams_moments(gradients, betas, ranks), 1):
        yield -lr * m / (1 - betas[0] ** t) / (np.sqrt(w / (1 - betas[1] ** t)) + eps)


@case(2, 3)
def dense_updates_of_adam_are_the_mean_of_local_ones():
    for make, ranks in (
        (torch.optim.Adam, 1),
        (functools.partial(hvdc.AdamW, weight_decay=0), hvd.size()),
    ):
        model = weights()
        optimizer = of_updates(model, make(model.parameters(), lr=0.01), "none")
        for step in range(20):
            step_with(model, optimizer, told(hvd.rank(), step))
        for name in SHAPES:
            gradients = [
                [told(rank, step)[name].double().numpy() for step in range(20)]
                for rank in range(hvd.size())
            ]
            expected = np.mean(
                [sum(adams_updates(of_rank, 0.01, ranks=ranks)) for of_rank in gradients], axis=0
            )
            assert (
                np.abs(model[name].detach().numpy() - expected).max()
                < 1e-6 * np.abs(expected).max() + 1e-7
            )


@case(2, 3)
def no_update_is_lost():
    """What has moved the parameters, and what is not sent yet, is all that ranks' optimizers have
    asked for: over changes of the learning rate, an exchange without steps, a save and a load."""
    specs = (
        "topk:ratio=0.02,min_numel=0",
        "topk:ratio=0.02,min_numel=0,exchange=split",
        "adacomp:min_numel=0",
        "dgc:ratio=0.02,min_numel=0",
        "powersgd:min_rate=1",
        "efsignsgd",
    )
    for spec in specs:
        model, local = weights(), weights()
        optimizer = of_updates(
            model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), spec
        )
        alone = torch.optim.SGD(local.parameters(), lr=1.0, momentum=0.5)
        for step in range(12):
            gradients = told(hvd.rank(), step)
            if step == 7:
                # On all ranks: nothing but what waits.
                optimizer.take_part()
            if step == 9:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                again = of_updates(
                    model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), spec
                )
                again.load_state_dict(torch.load(file, weights_only=False))
                optimizer = again
            for each in (optimizer, alone):
                each.param_groups[0]["lr"] = 1.0 if step < 6 else 0.1
            step_with(model, optimizer, gradients)
            step_with(local, alone, gradients)
            assert_replicas_identical(model)
        asked = hvd.allreduce(flat(local), name="asked")
        worst = (flat(model) + not_sent(optimizer) - asked).abs().max() / asked.abs().max()
        assert worst < 1e-5, (spec, worst)
        assert (
            0
            < optimizer.compression.stats()["bytes_sent"]
            < optimizer.compression.stats()["dense_bytes"] / 3
        )


EVENTS = (
    "step",
    "step",
    "step",
    "not finite on one rank",
    "another learning rate",
    "saved and loaded",
    "nothing to add",
    "another compression",
)
KEEPING = tuple(
    f"{spec},min_numel=0"
    for spec in (
        "topk:ratio=0.02",
        "topk:ratio=0.1,values=2bit",
        "dgc:ratio=0.02",
        "topk:exchange=split",
    )
)


@case(2, 3)
# So that all ranks go through the same ones.
@settings(max_examples=40, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
@given(
    st.sampled_from([*KEEPING, "adacomp:min_numel=0"]),
    st.lists(st.sampled_from(EVENTS), min_size=1, max_size=15),
    st.sampled_from([1, 3]),
)
def no_history_loses_an_update(spec, events, every):
    """What has moved the parameters and what waits are the mean of what ranks' optimizers have
    asked for, whatever has happened."""
    model, asked, lr = weights(), 0.0, 1.0
    optimizer = of_updates(model, torch.optim.SGD(model.parameters(), lr=lr), spec, every=every)
    for i, event in enumerate(events):
        gradients, before = told(hvd.rank(), i), flat(model)
        if event == "another learning rate":
            lr *= 0.3
            optimizer.param_groups[0]["lr"] = lr
        elif event == "saved and loaded":
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer = of_updates(
                model,
                torch.optim.SGD(model.parameters(), lr=lr),
                optimizer.compression.config,
                every=every,
            )
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        elif event == "nothing to add":
            optimizer.take_part()
        elif event == "another compression":
            optimizer.switch(KEEPING[i % len(KEEPING)])
        else:
            # In a longer round it takes that element's other steps with it.
            if event != "step" and every == 1 and hvd.rank() == 1:
                gradients["matrix"][0, 0] = float("nan")
            step_with(model, optimizer, gradients)
            asked = asked - lr * torch.cat(
                [gradients[name].flatten() for name in SHAPES]
            ).nan_to_num(0)
            if event != "step" and every == 1:
                assert torch.equal(flat(model), before)
    optimizer.take_part()
    assert_replicas_identical(model)
    if torch.is_tensor(asked):
        asked = hvd.allreduce(asked, name="asked")
        assert (flat(model) + not_sent(optimizer) - asked).abs().max() < 1e-5 * asked.abs().max(), (
            spec,
            events,
            every,
        )


@case(2)
def an_update_that_is_not_finite_moves_nothing():
    model, local = weights(), weights()
    optimizer = of_updates(model, torch.optim.SGD(model.parameters(), lr=1.0))
    alone = torch.optim.SGD(local.parameters(), lr=1.0)
    for step in range(6):
        gradients = told(hvd.rank(), step)
        before = flat(model)
        if step == 3:
            if hvd.rank() == 1:
                gradients["matrix"][0, 0] = float("nan")
            step_with(model, optimizer, gradients)
            assert (
                torch.equal(flat(model), before)
                and optimizer.compression.stats()["steps_undone"] == 1
            )
            if hvd.rank() == 1:  # What is finite waits.
                gradients["matrix"][0, 0] = 0
            step_with(local, alone, gradients)
            continue
        step_with(model, optimizer, gradients)
        step_with(local, alone, gradients)
    assert_replicas_identical(model)
    asked = hvd.allreduce(flat(local), name="asked")
    assert (flat(model) + not_sent(optimizer) - asked).abs().max() < 1e-5 * asked.abs().max()


@case(2, 3)
def every_algorithm_keeps_replicas_alike_on_updates():
    for spec in alike.SPECS:
        if "moments" in spec or "clip_norm" in spec or "follow_lr" in spec or "momentum" in spec:
            continue
        model = model_of()
        optimizer = of_updates(model, torch.optim.AdamW(model.parameters(), lr=0.01), spec)
        train(model, optimizer, batches(4))
        assert_replicas_identical(model)


@case(2)
def several_local_steps_and_an_outer_optimizer():
    """DiLoCo (arXiv 2311.08105, Algorithm 1), stated once more in NumPy."""
    model, every, outer = weights(), 4, hvdc.Nesterov(0.7, 0.9)
    optimizer = of_updates(
        model, torch.optim.Adam(model.parameters(), lr=0.01), "none", every=every, outer=outer
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    gradients = {
        name: [[told(rank, step)[name].double().numpy() for step in range(20)] for rank in range(2)]
        for name in SHAPES
    }
    updates = {
        name: [list(adams_updates(of_rank, 1.0)) for of_rank in its]
        for name, its in gradients.items()
    }
    expected, momentum = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 0.0)
    for step in range(20):
        step_with(model, optimizer, told(hvd.rank(), step))
        scheduler.step()
        if (step + 1) % every:
            assert optimizer.local_steps == (step + 1) % every
            here = flat(model)
            with optimizer.shared_parameters():
                assert_replicas_identical(model)
                assert not torch.equal(flat(model), here)
            assert torch.equal(flat(model), here)
            continue
        for name in SHAPES:
            rates = [0.01 * 0.5 ** (t // 6) for t in range(step + 1 - every, step + 1)]
            mean = np.mean(
                [
                    sum(r * u for r, u in zip(rates, of_rank[step + 1 - every : step + 1]))
                    for of_rank in updates[name]
                ],
                axis=0,
            )
            momentum[name] = outer.momentum * momentum[name] + mean
            expected[name] = expected[name] + outer.lr * (mean + outer.momentum * momentum[name])
            assert (
                np.abs(model[name].detach().numpy() - expected[name]).max()
                < 1e-5 * np.abs(expected[name]).max()
            )
        assert_replicas_identical(model)


@case(2)
def rounds_are_saved_and_loaded_in_their_middle():
    def start():
        model = model_of()
        options = {"every": 3, "outer": hvdc.Nesterov()}
        return model, of_updates(model, hvdc.AdamW(model.parameters(), lr=0.01), **options)

    data = list(batches(10))
    model, optimizer = start()
    train(model, optimizer, data[:5])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, data[5:])
    again, its_optimizer = start()
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    train(again, its_optimizer, data[5:])
    assert (
        torch.equal(flat(again), flat(model))
        and optimizer.local_steps == its_optimizer.local_steps == 1
    )
    with raises(RuntimeError, "ask for a portable state after an exchange"):
        optimizer.state_dict(portable=True)
    train(model, optimizer, data[:2])
    portable = optimizer.state_dict(portable=True)["updates"]["compression"]["tensors"]
    assert all(
        torch.equal(array, hvd.allreduce(array, name=f"p.{n}.{k}"))
        for n, arrays in portable.items()
        for k, array in arrays.items()
    )


@case(2)
def a_scaler_that_finds_infinities_on_one_rank():
    """That rank takes part with nothing, and the other's step counts."""
    model, reference = weights(), weights()
    optimizer = of_updates(model, torch.optim.SGD(model.parameters(), lr=1.0), "none")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    expected = torch.zeros_like(flat(reference))
    for step in range(4):
        gradients = told(hvd.rank(), step)
        optimizer.zero_grad()
        loss = sum((model[name] * gradient).sum() for name, gradient in gradients.items())
        scaler.scale(loss).backward()
        if step == 1 and hvd.rank() == 1:
            model["bias"].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        ranks = [0] if step == 1 else [0, 1]
        for rank in ranks:
            expected -= (
                torch.cat([gradient.flatten() for gradient in told(rank, step).values()]) / 2
            )
    assert_replicas_identical(model)
    assert (flat(model) - expected).abs().max() < 1e-5
    assert hvd.allgather_object(scaler.get_scale()) == [16.0, 4.0]


@case(2)
def a_late_rank_takes_part_with_what_it_has():
    model = weights()
    optimizer = of_updates(model, torch.optim.SGD(model.parameters(), lr=1.0), "none", every=4)
    for step in range(4 if hvd.rank() == 0 else 1):
        step_with(model, optimizer, told(hvd.rank(), step))
    if hvd.rank() == 1:
        optimizer.take_part()
    assert_replicas_identical(model)
    parts = [told(0, step) for step in range(4)] + [told(1, 0)]
    expected = (
        -sum(torch.cat([gradient.flatten() for gradient in part.values()]) for part in parts) / 2
    )
    assert (flat(model) - expected).abs().max() < 1e-5


@case(2)
def another_compression_of_updates_and_moments_of_all_ranks():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.scale * super().forward(x)

    model = model_of(Scaled)
    optimizer = of_updates(model, hvdc.AdamW(model.parameters(), lr=0.01), "none")
    train(model, optimizer, batches(3))
    before = optimizer.compression.stats()["bytes_sent"]
    optimizer.switch("topk:ratio=0.01,min_numel=0")
    train(model, optimizer, batches(3))
    assert optimizer.compression.stats()["bytes_sent"] - before < before / 10
    optimizer.average_state()
    for param in model.parameters():
        if param in optimizer.state:
            for key in ("exp_avg", "exp_avg_sq", "exp_signal_sq"):
                moment = optimizer.state[param][key]
                assert torch.equal(moment, hvd.allreduce(moment, name=key)) and moment.any()
    train(model, optimizer, batches(3))
    assert_replicas_identical(model)


@case(2)
def half_precision_and_other_layouts_of_updates():
    model = model_of().to(torch.bfloat16)
    model.conv.weight.data = model.conv.weight.data.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Horovod does not broadcast bfloat16.
    optimizer = hvdc.UpdateOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvdc.Compression.topk(ratio=0.1),
    )
    before = flat(model)
    train(model, optimizer, ((x.bfloat16(), y) for x, y in batches(4)))
    assert_replicas_identical(model)
    assert not torch.equal(flat(model), before)


@case(2)
def what_an_update_optimizer_refuses():
    model = model_of()
    optimizer = sgd(model)
    for spec, words in (
        ("dgc:momentum=0.5", "momentum is inside its updates"),
        ("dgc:clip_norm=1", "clip them with torch.nn.utils.clip_grad_norm_"),
        ("efsignsgd:follow_lr=true", "the learning rate is inside the updates"),
        ("variance:moments=per_sample", "moments=minibatch only"),
        (hvdc.Compression.auto(), "name one for updates"),
        ("nonsense", "nonsense"),
    ):
        with raises(ValueError, words):
            hvdc.UpdateOptimizer(optimizer, compression=spec)
    for options, words in (({"every": 0}, "1 or more"), ({"every": True}, "1 or more")):
        with raises(ValueError, words):
            hvdc.UpdateOptimizer(optimizer, **options)
    with raises(TypeError, "save its state_dict()"):
        copy.deepcopy(hvdc.UpdateOptimizer(torch.optim.AdamW(model.parameters())))
    own = hvdc.AdamW(model.parameters())
    with raises(ValueError, "with this process set", "say ranks=1"):
        hvdc.UpdateOptimizer(own, process_set=hvd.ProcessSet([0]))
    with raises(ValueError, "Horovod has averaged these"):
        hvd.DistributedOptimizer(own, model.named_parameters()).step()
    with raises(TypeError, "Nesterov(lr, momentum)"):
        hvdc.UpdateOptimizer(optimizer, outer=0.7)
    with raises(ValueError, "momentum from 0 to below 1"):
        hvdc.Nesterov(momentum=1)
    with raises(ValueError, "exchanges already"):
        hvdc.UpdateOptimizer(hvd.DistributedOptimizer(sgd(model), model.named_parameters()))
    torch.manual_seed(hvd.rank())
    differing = nn.Linear(3, 3)
    with raises(MismatchError, "call hvd.broadcast_parameters"):
        step_in = hvdc.UpdateOptimizer(
            sgd(differing), named_parameters=differing.named_parameters()
        )
        differing(torch.ones(1, 3)).sum().backward()
        step_in.step()
    late = of_updates(model, sgd(model))
    with raises(ValueError, "add them to the optimizer before"):
        late.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    model.frozen.requires_grad_(True)
    with raises(ValueError, "make a new one for them"):
        late.take_part()
    with raises(TypeError, "optimizer.take_part()"), hvdc.uneven(late, model):
        pass
    turning = nn.ParameterDict({"phase": nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    with raises(ValueError, "phase", "real floating point"):
        hvdc.UpdateOptimizer(sgd(turning), named_parameters=turning.named_parameters())
