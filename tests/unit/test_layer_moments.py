"""Sums over samples of squared gradients, by kind of layer: against a loop over samples."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from moments_checks import B, assert_taken, collector, loop, loss_of, tokens  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

# (module, input): every kind, with the options that change how its parameters are used
KINDS = {
    "linear": lambda: (nn.Linear(4, 3), torch.randn(B, 4)),
    "linear without bias": lambda: (nn.Linear(4, 3, bias=False), torch.randn(B, 4)),
    "linear over positions": lambda: (nn.Linear(4, 3), torch.randn(B, 6, 4)),
    "linear over a grid": lambda: (nn.Linear(4, 3), torch.randn(B, 2, 3, 4)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(B, 4, 9)),
    "conv1d circular": lambda: (
        nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"),
        torch.randn(B, 2, 9),
    ),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3), torch.randn(B, 3, 6, 7)),
    "conv2d stride and padding": lambda: (
        nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(2, 1)),
        torch.randn(B, 3, 8, 9),
    ),
    "conv2d dilated": lambda: (
        nn.Conv2d(2, 4, 3, dilation=(1, 2), padding="same"),
        torch.randn(B, 2, 6, 7),
    ),
    "conv2d even, same": lambda: (nn.Conv2d(2, 4, (2, 4), padding="same"), torch.randn(B, 2, 6, 7)),
    "conv2d valid": lambda: (
        nn.Conv2d(2, 4, 3, padding="valid", bias=False),
        torch.randn(B, 2, 6, 7),
    ),
    "conv2d depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4, padding=1), torch.randn(B, 4, 5, 5)),
    "conv2d reflecting": lambda: (
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        torch.randn(B, 2, 5, 5),
    ),
    "conv2d channels last": lambda: (
        nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
        torch.randn(B, 4, 5, 5).to(memory_format=torch.channels_last),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2, padding=(0, 1, 0)), torch.randn(B, 2, 3, 3, 4)),
    "embedding": lambda: (nn.Embedding(7, 3), tokens(B, 9)),
    "embedding of one token": lambda: (nn.Embedding(7, 3), tokens(B)),
    "embedding with padding": lambda: (nn.Embedding(7, 3, padding_idx=2), tokens(B, 2, 9)),
    "layer norm": lambda: (nn.LayerNorm(6), torch.randn(B, 6)),
    "layer norm over positions": lambda: (nn.LayerNorm((4, 6), eps=0.1), torch.randn(B, 3, 4, 6)),
    "group norm": lambda: (nn.GroupNorm(2, 6), torch.randn(B, 6, 4, 3)),
    "group norm without positions": lambda: (nn.GroupNorm(2, 6, eps=0.1), torch.randn(B, 6)),
    "instance norm": lambda: (nn.InstanceNorm2d(3, affine=True), torch.randn(B, 3, 4, 5)),
    "instance norm of sequences": lambda: (
        nn.InstanceNorm1d(3, affine=True, eps=0.1),
        torch.randn(B, 3, 7),
    ),
}
if hasattr(nn, "RMSNorm"):
    KINDS["rms norm"] = lambda: (nn.RMSNorm((2, 6)), torch.randn(B, 3, 2, 6))
ALONE = {
    "linear": lambda: (nn.Linear(4, 3), torch.randn(4)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3), torch.randn(4, 9)),
    "conv2d": lambda: (nn.Conv2d(4, 6, 3), torch.randn(4, 5, 5)),
    "embedding": lambda: (nn.Embedding(7, 3), tokens()),
    "layer norm": lambda: (nn.LayerNorm((4, 3)), torch.randn(4, 3)),
    "instance norm": lambda: (nn.InstanceNorm1d(4, affine=True), torch.randn(4, 9)),
}


def made(kinds, kind):
    torch.manual_seed(0)
    module, x = kinds[kind]()
    with torch.no_grad():
        for param in module.parameters():  # norms begin with ones and zeros
            param.add_(0.3 * torch.randn_like(param))
    return module, x


@pytest.mark.parametrize("kind", KINDS)
def test_per_sample_sums_equal_a_loop_over_samples(kind):
    module, x = made(KINDS, kind)
    expected = loop(module, x)
    moments = collector(module)
    loss_of(module(x)).backward()
    assert_taken(moments, expected)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 100])
def test_batches_are_worked_through_in_blocks(kind, block, monkeypatch):
    monkeypatch.setattr("horovod_compress.torch_common.samples._BLOCK", block)
    test_per_sample_sums_equal_a_loop_over_samples(kind)


@pytest.mark.parametrize("kind", ALONE)
def test_an_input_without_a_batch_is_one_sample(kind):
    module, x = made(ALONE, kind)
    moments = collector(module)
    module(x).sin().sum().backward()
    assert_taken(moments, {name: param.grad**2 for name, param in module.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "kind", ["linear", "linear over positions", "conv2d", "embedding", "layer norm", "group norm"]
)
def test_other_types_are_squared_in_float32(kind, dtype):
    module, x = made(KINDS, kind)
    module, x = module.to(dtype), x.to(dtype) if x.is_floating_point() else x
    expected = loop(copy.deepcopy(module).double(), x.double() if x.is_floating_point() else x)
    moments, microbatch = collector(module), collector(module, "microbatch")
    # Squares that float16 does not have.
    (2.0**-10 * loss_of(module(x).float())).backward()
    expected = {name: sums * 2.0**-20 for name, sums in expected.items()}
    assert_taken(moments, expected, rtol=1e-4 if dtype == torch.float64 else 0.1)
    assert_taken(
        microbatch, {name: param.grad.float() ** 2 for name, param in module.named_parameters()}
    )


@pytest.mark.parametrize("kind", ["linear", "linear over positions", "conv2d"])
def test_sums_keep_their_precision_in_a_backward_pass_under_autocast(kind):
    module, x = made(KINDS, kind)
    expected = loop(module, x)
    moments = collector(module)
    loss = loss_of(module(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert_taken(moments, expected)
