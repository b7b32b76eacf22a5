"""Every algorithm gives on real ranks what `simulate` gives, and trains."""

import copy

import alike
import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import available, simulate

from .told import Holder, reduced, told
from .training import assert_replicas_identical, batches, model_of, wrap

CASES, case = registry()


@case(2, 3)
def every_algorithm_gives_what_simulate_gives():
    steps, size = 4, hvd.size()
    named = [
        [{f"held.{n}": g.numpy() for n, g in told(rank, step).items()} for rank in range(size)]
        for step in range(steps)
    ]
    for op, groups in ((hvd.Average, None), (hvd.Sum, 2)):
        for id in available():
            expected = simulate(id, named)
            model = Holder()
            # Takes nothing over: momentum would be DGC's.
            optimizer = torch.optim.Adam(model.parameters())
            compression = hvdc.Compression.from_spec(
                id if id != "dgc" else "dgc:momentum=0.9",
                optimizer,
                named_parameters=model.named_parameters(),
            )
            wrapped = wrap(model, optimizer, compression, op=op, groups=groups)
            for step in range(steps):
                model.zero_grad()
                model(told(hvd.rank(), step)).backward()
                wrapped.synchronize()
                for name, param in model.named_parameters():
                    mean = torch.from_numpy(expected.mean[step][name]) * (
                        1 if op == hvd.Average else size
                    )
                    error = (param.grad - mean).abs().max().item()
                    tolerance = 2e-3 if id == "fp16" else 1e-5
                    assert error <= tolerance * size * mean.abs().max().item() + 1e-30, (
                        f"{id}: {name} differs by {error} in step {step}"
                    )
                with wrapped.skip_synchronize():
                    wrapped.step()
            found = alike.sent_of_tensors(compression)
            sent = sum(sent[hvd.rank()] for sent in expected.bytes_sent)
            assert found == sent, f"{id}: {found} bytes sent, {sent} in simulate"
            assert_replicas_identical(model)


@case(2, 3)
def residuals_follow_each_groups_learning_rate():
    """efsignsgd under a scheduler, with a group of its own rate, through a checkpoint: as
    `simulate`, which is as published."""
    groups, rates = {"matrix": 1.0, "kernel": 0.3}, [0.1, 0.2, 0.2, 0.02, 0.5, 0.05]

    def start():
        params = {name: nn.Parameter(torch.zeros(alike.SHAPES[name])) for name in groups}
        optimizer = torch.optim.SGD(
            [{"params": [params[name]], "lr": times} for name, times in groups.items()]
        )
        compression = hvdc.Compression.from_spec(
            "efsignsgd:min_numel=0", optimizer, named_parameters=list(params.items())
        )
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=list(params.items()), compression=compression
        )
        return (
            params,
            compression,
            wrapped,
            torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: rates[min(step, 5)]),
        )

    def take(params, wrapped, scheduler, steps):
        for step in steps:
            given = alike.gradients(hvd.rank(), step)
            wrapped.zero_grad()
            sum(
                (param * torch.from_numpy(given[name])).sum() for name, param in params.items()
            ).backward()
            wrapped.step()
            scheduler.step()

    params, compression, wrapped, scheduler = start()
    take(params, wrapped, scheduler, range(3))
    saved = [copy.deepcopy(part.state_dict()) for part in (compression, wrapped, scheduler)]
    values = {name: param.detach().clone() for name, param in params.items()}
    params, compression, wrapped, scheduler = start()
    for part, state in zip((compression, wrapped, scheduler), saved):
        part.load_state_dict(state)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(values[name])
    take(params, wrapped, scheduler, range(3, 6))
    gradients = [[alike.gradients(rank, step) for rank in range(hvd.size())] for step in range(6)]
    for name, times in groups.items():
        own = [[{name: named[name]} for named in ranks] for ranks in gradients]
        run = simulate("efsignsgd:min_numel=0", own, lr=[rate * times for rate in rates])
        expected = -sum(
            rate * times * mean[name].astype(np.float64) for rate, mean in zip(rates, run.mean)
        )
        np.testing.assert_allclose(params[name].detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        plain = simulate("efsignsgd:min_numel=0", own)
        other = -sum(
            rate * times * mean[name].astype(np.float64) for rate, mean in zip(rates, plain.mean)
        )
        assert np.abs(other - expected).max() > 0.01 * np.abs(expected).max(), (
            "the rates would not show"
        )
        residual = compression.state_dict()["tensors"][name]["residual"].numpy()
        np.testing.assert_allclose(
            residual, run.state[hvd.rank()][name]["residual"], rtol=1e-4, atol=1e-4
        )
    with raises(ValueError, "follow_lr needs the optimizer"):
        hvdc.Compression.from_spec(
            "efsignsgd:follow_lr=true", None, named_parameters=list(params.items())
        )


@case(2, 3)
def coordinates_of_the_whole_model():
    """K of all tensors together, also where a tensor has none of them: as `simulate`."""

    def named(rank, step):
        return {f"held.{name}": gradient.numpy() for name, gradient in told(rank, step).items()}

    for spec in ("globalrandk:k=40", "maxnorm:k=40", "multiscale:k=40,unbiased=true"):
        spec += ",of=model,min_numel=0"
        found, compression = reduced(spec, steps=3)
        run = simulate(
            spec, [[named(rank, step) for rank in range(hvd.size())] for step in range(3)]
        )
        expected = np.array(
            [np.concatenate([mean[name].reshape(-1) for name in named(0, 0)]) for mean in run.mean]
        )
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
        sent = sum(sent[hvd.rank()] for sent in run.bytes_sent)
        assert alike.sent_of_tensors(compression) == sent, spec


@case(2)
def every_algorithm_trains():
    """Hooks in any order, accumulation, half precision, a scaler that skips a step: finite, and the
    same on all ranks."""
    for id in available():
        model = model_of()
        model.shared.half()
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=0.001 if id == "signsgd" else 0.01,
            momentum=0.9,
            weight_decay=1e-4,
        )
        compression = hvdc.Compression.from_spec(
            id, optimizer, named_parameters=model.named_parameters()
        )
        wrapped = wrap(model, optimizer, compression, backward_passes_per_step=2)
        for step, (x, y) in enumerate(batches(12)):
            x = torch.relu(model.norm(model.conv(x))).mean(1).flatten(1)
            hidden = torch.relu(model.shared(torch.relu(model.shared(x.half())))).float()
            loss = nn.functional.cross_entropy(model.out(torch.relu(model.frozen(hidden))), y)
            (loss * (float("nan") if step == 5 and hvd.rank() == 1 else 1)).backward()
            if step % 2:
                wrapped.synchronize()
                finite = all(
                    torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad
                )
                assert finite == (step != 5), f"{id}: finite {finite} in step {step}"
                with wrapped.skip_synchronize():
                    if finite:
                        wrapped.step()
                model.zero_grad()
        assert_replicas_identical(model)
        assert compression.stats()["steps_undone"] == 1, (
            f"{id}: {compression.stats()['steps_undone']} steps undone"
        )


@case(2)
def told_gradients_give_what_simulate_gives_to_the_last_bit():
    for spec in alike.SPECS:
        params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in alike.SHAPES.items()}
        optimizer = torch.optim.Adam(params.values())
        compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=list(params.items())
        )
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=list(params.items()), compression=compression
        )
        results = []
        for step in range(alike.STEPS):
            wrapped.zero_grad()
            given = alike.gradients(hvd.rank(), step)
            sum(
                (params[name] * torch.from_numpy(gradient)).sum()
                for name, gradient in given.items()
            ).backward()
            wrapped.synchronize()
            results.append({name: param.grad.numpy().copy() for name, param in params.items()})
        sent = alike.sent_of_tensors(compression)
        alike.assert_simulated(spec, hvd.rank(), hvd.size(), results, sent)


@case()
def a_compressor_of_another_package():
    """For test_other_packages.py, which installs one."""
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in alike.SHAPES.items()}
    optimizer = torch.optim.Adam(params.values())
    compression = hvdc.Compression.cyclic(optimizer, named_parameters=list(params.items()), every=4)
    assert compression.config["id"] == "cyclic"
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=list(params.items()), compression=compression
    )
    for step, means in enumerate(alike.cyclic_means(4, hvd.size())):
        wrapped.zero_grad()
        given = alike.gradients(hvd.rank(), step)
        sum(
            (params[name] * torch.from_numpy(gradient)).sum() for name, gradient in given.items()
        ).backward()
        wrapped.synchronize()
        for name, mean in means.items():
            np.testing.assert_allclose(params[name].grad.numpy(), mean, atol=1e-6)
    assert compression.stats()["ratio"] > 2
