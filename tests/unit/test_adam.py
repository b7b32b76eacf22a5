"""hvdc.AdamW: steps of a rank's part of the batch that are as large as those of the whole."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

import horovod_compress.torch as hvdc  # noqa: E402


def steps_with(optimizer, param, gradients):
    for grad in gradients:
        param.grad = grad.clone()
        optimizer.step()


def gradients_of(steps, shape, seed=0, signal=0.0):
    return signal + torch.randn(
        (steps, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def weights(shape=(3, 4)):
    return torch.nn.Parameter(
        torch.linspace(-1, 1, int(np.prod(shape)), dtype=torch.float64).reshape(shape).clone()
    )


@examples(100)
@given(
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    decay=st.floats(0, 0.5),
    lr=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_one_rank_has_torchs_adamw(betas, decay, lr, seed):
    ours, torchs = weights(), weights()
    options = {"lr": lr, "betas": betas, "weight_decay": decay}
    for make, param in ((torch.optim.AdamW, torchs), (hvdc.AdamW, ours)):
        steps_with(
            make([param], **options, **({"ranks": 1} if param is ours else {})),
            param,
            gradients_of(7, (3, 4), seed),
        )
    torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-12)


def test_it_follows_its_formula():
    """The class's, once more in NumPy."""
    lr, beta1, beta2, eps, decay, ranks = 0.1, 0.9, 0.99, 1e-3, 0.1, 4
    param, p, m = weights(), weights().detach().numpy().copy(), 0.0
    gradients = gradients_of(9, (3, 4), signal=0.5)
    steps_with(hvdc.AdamW([param], lr, (beta1, beta2), eps, decay, ranks), param, gradients)
    v = q = None
    for t, g in enumerate(gradients.numpy(), 1):
        v = beta2 * (0 if v is None else v) + (1 - beta2) * g * g
        q = v if q is None else beta2 * q + (1 - beta2) * g * m / (1 - beta1 ** (t - 1))
        m = beta1 * m + (1 - beta1) * g
        square = (v / ranks + (1 - 1 / ranks) * np.maximum(q, 0)) / (1 - beta2**t)
        p = p - lr * decay * p - lr * m / (1 - beta1**t) / (np.sqrt(square) + eps)
    np.testing.assert_allclose(param.detach().numpy(), p, rtol=1e-9)


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("signal", [0.0, 0.1, 3.0])
def test_a_part_of_the_batch_has_the_second_moment_of_the_whole(ranks, signal):
    """The whole batch's noise has a standard deviation of 1, that of a part √ranks. torch's is
    nearly ranks times too large where noise prevails."""
    size = 2000
    noise = gradients_of(600, (size,)) * ranks**0.5
    part = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
    optimizer = hvdc.AdamW(
        [part], lr=1.0, betas=(0.9, 0.99), weight_decay=0.0, eps=0.0, ranks=ranks
    )
    steps_with(optimizer, part, signal + noise)
    before = part.detach().clone()
    state = optimizer.state[part]
    steps_with(optimizer, part, signal + gradients_of(1, (size,), seed=1) * ranks**0.5)
    mean = state["exp_avg"] / (1 - 0.9**601)
    divided_by = (mean / (before - part.detach())).square()
    expected = signal**2 + 1
    # q is a mean over some 100 steps, so it is noisy, and negative values are cut off: what that
    # adds grows with √ranks.
    assert abs(divided_by.median() / expected - 1) < 0.1 + 0.02 * ranks, (
        divided_by.median() / expected
    )
    assert state["exp_avg_sq"].mean() / (1 - 0.99**601) > 0.9 * (signal**2 + ranks)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_it_counts_steps_in_float32_whatever_torchs_defaults_are(default):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    torch.set_default_dtype(default)
    torch.set_default_device("meta")
    try:
        optimizer = hvdc.AdamW([param], ranks=1)
        steps_with(optimizer, param, [torch.ones_like(param)] * 300)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    count = optimizer.state[param]["step"]
    assert (count.item(), count.dtype, count.device.type) == (300, torch.float32, "cpu")


def test_it_goes_on_from_its_state():
    data = gradients_of(9, (3, 4))
    whole, param = weights(), weights()
    options = {"lr": 0.1, "ranks": 4}
    steps_with(hvdc.AdamW([whole], **options), whole, data)
    first = hvdc.AdamW([param], **options)
    steps_with(first, param, data[:4])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = hvdc.AdamW([param], lr=9.0)
    again.load_state_dict(torch.load(file, weights_only=True))
    steps_with(again, param, data[4:])
    assert torch.equal(param, whole)


@pytest.mark.parametrize("known", ["nothing", "zeros", "what torch's has kept"])
def test_where_nothing_is_known_of_the_signal_steps_are_as_torchs(known):
    """As many ranks as there may be: what they have alike would not average out."""
    ours, torchs = weights(), weights()
    optimizers = hvdc.AdamW([ours], lr=0.1, ranks=64), torch.optim.AdamW([torchs], lr=0.1)
    history = {"nothing": 0, "zeros": 5, "what torch's has kept": 5}[known]
    for optimizer, param in zip(optimizers, (ours, torchs)):
        steps_with(
            optimizer, param, [torch.full_like(param, float("torch" in known)).detach()] * history
        )
    if "torch" in known:
        optimizers[0].load_state_dict(optimizers[1].state_dict())
        ours.data.copy_(torchs.data)
    for optimizer, param in zip(optimizers, (ours, torchs)):
        steps_with(optimizer, param, [torch.ones_like(param)])
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=0)


def test_gradients_in_half_precision():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    steps_with(
        hvdc.AdamW([param], lr=0.5, weight_decay=0.0, ranks=4),
        param,
        [torch.full_like(param, 250.0)],
    )
    assert torch.equal(param, torch.full_like(param, 0.5))


def test_closures_groups_and_what_has_no_gradient():
    one, other, frozen = weights(), weights(), weights()
    optimizer = hvdc.AdamW(
        [{"params": [one, frozen], "lr": 0.1}, {"params": [other], "ranks": 8}], lr=0.2
    )
    frozen.requires_grad_(False)

    def closure():
        optimizer.zero_grad()
        loss = (one.square() + other.square()).sum()
        loss.backward()
        return loss

    hvd.init()
    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0] / 4 and torch.equal(frozen, weights())


@pytest.mark.parametrize(
    "options, said",
    [
        ({"lr": -1}, "lr, eps and weight_decay must be at least 0"),
        ({"eps": float("nan")}, "lr, eps and weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"ranks": 0}, "ranks must be a number of ranks"),
        ({"ranks": 2.0}, "ranks must be a number of ranks"),
    ],
)
def test_mistakes_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        hvdc.AdamW([weights()], **options)


@pytest.mark.parametrize("options", [{"ranks": -4}, {"betas": (0.9, 1.0)}, {"lr": -1.0}])
def test_mistakes_in_groups_are_named(options):
    with pytest.raises(ValueError, match="must be"):
        hvdc.AdamW([{"params": [weights()], **options}])
    hvdc.AdamW([weights()], ranks=np.int64(2))


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        hvdc.AdamW(embedding.parameters(), ranks=2).step()
