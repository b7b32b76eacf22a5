"""What the variance compressor calls a sample."""

import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc

from .training import (
    assert_replicas_identical,
    batches,
    compressed,
    flat,
    model_of,
    sgd,
    wrap,
)

CASES, case = registry()


def sums_of_squares(model, passes, per_sample):
    """{name: Σ_z g_z²} of some backward passes of `train`, z being their samples or the passes
    themselves."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    sums = {name: torch.zeros(param.shape) for name, param in named.items()}
    for x, y in passes:
        for part in zip(x.split(1), y.split(1)) if per_sample else [(x, y)]:
            loss = nn.functional.cross_entropy(model(part[0]), part[1]) * len(part[0]) / len(x)
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values()))):
                sums[name] += (gradient.to_dense() if gradient.is_sparse else gradient) ** 2
    return sums


def assert_variances_are(compression, sums):
    for name, arrays in compression.state_dict()["tensors"].items():
        atol = 1e-4 * sums[name].max().item()
        torch.testing.assert_close(
            arrays["v"], sums[name].flatten(), rtol=1e-4, atol=atol, msg=lambda m: f"{name}: {m}"
        )


NEVER_SENT = "variance:alpha=1e30,zeta=1,min_numel=0"  # v keeps the sum of all squares


@case(2)
def variance_of_samples_and_of_backward_passes():
    for moments in ("per_sample", "microbatch"):
        model, passes = model_of(), list(batches(3))
        model.norm = nn.GroupNorm(2, 8)
        optimizer = sgd(model)
        compression = hvdc.Compression.from_spec(
            f"{NEVER_SENT},moments={moments}", optimizer, named_parameters=model.named_parameters()
        )
        wrapped = wrap(model, optimizer, compression, backward_passes_per_step=3)
        expected = sums_of_squares(model, passes, moments == "per_sample")
        for x, y in passes:
            nn.functional.cross_entropy(model(x), y).backward()
        wrapped.step()
        assert_variances_are(compression, expected)

    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvdc.Compression.from_spec(
        f"{NEVER_SENT},moments=microbatch", optimizer, named_parameters=model.named_parameters()
    )
    wrapped = wrap(model, optimizer, compression, backward_passes_per_step=2, sparse_as_dense=True)
    passes = [(torch.randint(0, 16, (8, 4)), torch.randint(0, 10, (8,))) for _ in range(2)]
    expected = sums_of_squares(model, passes, per_sample=False)
    for x, y in passes:
        nn.functional.cross_entropy(model(x), y).backward()
    wrapped.step()
    assert_variances_are(compression, expected)


@case(2)
def training_with_moments():
    trained = {}
    for moments in ("minibatch", "microbatch", "per_sample"):
        model = trained[moments] = model_of()
        compression = compressed(
            model, sgd(model), 10, f"variance:min_numel=0,exclude=norm.*,moments={moments}"
        )
        assert_replicas_identical(model)
        assert compression.stats()["elements_sent"] > 0
    # A step is one pass here.
    assert torch.equal(flat(trained["minibatch"]), flat(trained["microbatch"]))
    assert not torch.equal(flat(trained["minibatch"]), flat(trained["per_sample"]))
    model = model_of()
    with raises(ValueError, "norm.weight", "BatchNorm2d", "exclude="):
        hvdc.Compression.variance(
            sgd(model), named_parameters=model.named_parameters(), min_numel=0, moments="per_sample"
        )


@case(1)
def one_rank_is_not_hooked():
    model = model_of()
    compression = compressed(model, sgd(model), 1, "variance:min_numel=0,moments=per_sample")
    assert not nn.modules.module._global_forward_hooks and compression.stats()["steps"] == 0
