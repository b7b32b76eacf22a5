"""Steps that do not come as backward(), then step(). What one rank can show of them is in
tests/unit/test_steps.py."""

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc

from .training import (
    DENSE,
    assert_close,
    assert_replicas_identical,
    batches,
    model_of,
    sgd,
    train,
    wrap,
)

CASES, case = registry()


def made(spec):
    return hvdc.Compression.from_spec(spec) if spec else hvd.Compression.none


@case(2)
def closures_that_synchronize():
    models = [model_of(), model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE, "topk:ratio=0.05")):
        optimizer = wrap(model, sgd(model, nesterov=True, weight_decay=0.1), made(spec))
        for x, y in batches(5):

            def closure(x=x, y=y, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.synchronize()
                return loss

            with optimizer.skip_synchronize():
                optimizer.step(closure)
        assert_replicas_identical(model)
    assert_close(models[1], models[0])
    with hvdc.uneven(optimizer):
        for _ in range(3 if hvd.rank() == 0 else 1):
            with optimizer.skip_synchronize():
                optimizer.step(closure)
    assert_replicas_identical(model)


@case(2)
def layers_frozen_before_the_first_gradient():
    """In `uneven` with a rank that has no data first."""
    for spec, options in (
        (DENSE, {"groups": 2}),
        ("topk:ratio=0.05", {}),
        ("maxnorm", {"backward_passes_per_step": 2}),
        ("variance:moments=microbatch", {"groups": 3}),
    ):
        model = model_of()
        optimizer = wrap(model, sgd(model, weight_decay=0.1), made(spec), **options)
        model.conv.requires_grad_(False)
        with hvdc.uneven(optimizer, model):
            train(model, optimizer, batches(3 if hvd.rank() == 0 else 0))
        model.conv.requires_grad_(True)
        train(model, optimizer, batches(3, seed=1))
        assert_replicas_identical(model)
        assert hvdc.compression_of(optimizer).stats()["steps"] == 6
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        optimizer = wrap(model, sgd(model, weight_decay=0.1), made(spec))
        model.conv.requires_grad_(False)
        train(model, optimizer, batches(3))
        model.conv.requires_grad_(True)
        train(model, optimizer, batches(3, seed=1))
    assert_close(*models)


@case(2)
def what_is_averaged_by_hand_keeps_what_sgd_does():
    models = [model_of(), model_of()]
    for model, spec in zip(models, (None, DENSE)):
        optimizer = wrap(model, sgd(model, nesterov=True, weight_decay=0.1), made(spec))
        model.frozen.requires_grad_(True)
        for x, y in batches(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for name, param in model.frozen.named_parameters():
                param.grad = hvd.allreduce(param.grad, name=f"by hand {name}")
            optimizer.step()
        assert_replicas_identical(model)
    assert_close(*models)


@case(2)
def gradients_that_are_used_again():
    """Sharpness-aware minimization, with the recipe of docs/recipes.md."""
    models = [model_of(), model_of(), model_of()]
    for model, spec in zip(models, (None, f"{DENSE},momentum=0", "dgc:ratio=0.05,momentum=0")):
        compression = hvdc.Compression.from_spec(spec, discardable=True) if spec else made(spec)
        optimizer = wrap(model, sgd(model), compression)
        trained = [p for p in model.parameters() if p.requires_grad]
        for x, y in batches(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.synchronize()
            norm = torch.stack([p.grad.norm() for p in trained]).norm()
            moved = [0.05 / norm * p.grad for p in trained]
            torch._foreach_add_([p.data for p in trained], moved)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.synchronize()
            torch._foreach_sub_([p.data for p in trained], moved)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_replicas_identical(model)
    assert_close(models[1], models[0])
    assert compression.stats()["steps_undone"] == 5


@case(2)
def what_steps_refuse():
    """On all ranks alike."""
    model = model_of()
    optimizer = wrap(model, sgd(model), made("topk:ratio=0.05"))
    x, y = next(batches(1))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with raises(RuntimeError, "hvdc.UpdateOptimizer", "optimizer.synchronize()"):
        optimizer.step(closure)
    encoder, optimizers = nn.Linear(64, 64), []
    for i in range(2):
        optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
        optimizers.append(wrap(encoder, optimizer, made("topk:min_numel=0"), prefix=f"{i}."))
    encoder(x.flatten(1)).sum().backward()
    optimizers[0].step()
    with raises(RuntimeError, "another compression has this parameter"):
        optimizers[1].step()
