"""Sums over samples of squared gradients: against a loop over samples, and what becomes of passes that end otherwise."""
import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from torch import nn  # noqa: E402
from torch.nn.modules import module as torch_modules  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from horovod_compress.torch.moments import Moments  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
B = 5


def collector(module, moments="per_sample"):
    return Moments(moments, dict(module.named_parameters()))


def loss_of(output):
    """A mean over samples, in which every element of the output has a weight of its own."""
    weights = torch.linspace(0.1, 1, output[0].numel()).reshape(output.shape[1:]).to(output.dtype)
    return (output.sin() * weights).flatten(1).sum(1).mean()


def loop(module, *inputs, loss=loss_of):
    """{name: Σ_z (g_z / B)²}, by autograd on each sample alone."""
    named, batch = dict(module.named_parameters()), len(inputs[0])
    sums = {name: torch.zeros(param.shape) for name, param in named.items()}
    for z in range(batch):
        gradients = torch.autograd.grad(loss(module(*(x[z : z + 1] for x in inputs))) / batch, list(named.values()))
        for name, gradient in zip(named, gradients):
            sums[name] += gradient.float() ** 2
    return sums


def assert_taken(collector, sums, rtol=1e-4):
    for name, expected in sums.items():
        taken = collector.take(name)
        assert taken is not None and taken.dtype == "float32" and taken.shape == (expected.numel(),), name
        atol = rtol * expected.max().item()  # of the largest, because what is squared are sums that may cancel
        torch.testing.assert_close(
            torch.from_numpy(taken), expected.flatten(), rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}"
        )
        assert collector.take(name) is None, "the sums are handed over once"


def tokens(*shape, high=7):
    return torch.randint(0, high, shape)


# (module, input): every kind, with the options that change how its parameters are used
KINDS = {
    "linear": lambda: (nn.Linear(4, 3), torch.randn(B, 4)),
    "linear without bias": lambda: (nn.Linear(4, 3, bias=False), torch.randn(B, 4)),
    "linear over positions": lambda: (nn.Linear(4, 3), torch.randn(B, 6, 4)),
    "linear over a grid": lambda: (nn.Linear(4, 3), torch.randn(B, 2, 3, 4)),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(B, 4, 9)),
    "conv1d circular": lambda: (nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), torch.randn(B, 2, 9)),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3), torch.randn(B, 3, 6, 7)),
    "conv2d stride and padding": lambda: (nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(2, 1)), torch.randn(B, 3, 8, 9)),
    "conv2d dilated": lambda: (nn.Conv2d(2, 4, 3, dilation=(1, 2), padding="same"), torch.randn(B, 2, 6, 7)),
    "conv2d even, same": lambda: (nn.Conv2d(2, 4, (2, 4), padding="same"), torch.randn(B, 2, 6, 7)),
    "conv2d valid": lambda: (nn.Conv2d(2, 4, 3, padding="valid", bias=False), torch.randn(B, 2, 6, 7)),
    "conv2d depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4, padding=1), torch.randn(B, 4, 5, 5)),
    "conv2d reflecting": lambda: (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), torch.randn(B, 2, 5, 5)),
    "conv2d channels last": lambda: (
        nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), torch.randn(B, 4, 5, 5).to(memory_format=torch.channels_last)
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
    "instance norm of sequences": lambda: (nn.InstanceNorm1d(3, affine=True, eps=0.1), torch.randn(B, 3, 7)),
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 100])
def test_batches_are_worked_through_in_blocks(kind, block, monkeypatch):
    monkeypatch.setattr("horovod_compress.torch.moments._BLOCK", block)
    test_per_sample_sums_equal_a_loop_over_samples(kind)


@pytest.mark.parametrize("kind", ALONE)
def test_an_input_without_a_batch_is_one_sample(kind):
    module, x = made(ALONE, kind)
    moments = collector(module)
    module(x).sin().sum().backward()
    assert_taken(moments, {name: param.grad**2 for name, param in module.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["linear", "linear over positions", "conv2d", "embedding", "layer norm", "group norm"])
def test_other_types_are_squared_in_float32(kind, dtype):
    module, x = made(KINDS, kind)
    module, x = module.to(dtype), x.to(dtype) if x.is_floating_point() else x
    expected = loop(copy.deepcopy(module).double(), x.double() if x.is_floating_point() else x)
    moments, microbatch = collector(module), collector(module, "microbatch")
    (2.0**-10 * loss_of(module(x).float())).backward()  # squares that float16 does not have
    expected = {name: sums * 2.0**-20 for name, sums in expected.items()}
    assert_taken(moments, expected, rtol=1e-4 if dtype == torch.float64 else 0.1)
    assert_taken(microbatch, {name: param.grad.float() ** 2 for name, param in module.named_parameters()})


class Net(nn.Module):
    """What makes models hard: in-place activations, a layer used twice, a residual, keyword arguments."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.shared = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv(input=x))).mean(3).view(len(x), 2, 8)
        for _ in range(2):
            y = self.shared(x)
            y += x
            x = torch.relu_(y)
        return self.out(x)


class Tied(nn.Module):
    """One weight, a decoder's and an embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=1)
        self.decoder = nn.Linear(4, 7)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.embedding(x)))


@pytest.fixture
def net():
    torch.manual_seed(1)
    return Net(), torch.randn(B, 2, 4, 4)


def test_a_model(net):
    model, x = net
    expected = loop(model, x)
    moments = collector(model)
    loss_of(model(x)).backward()
    assert_taken(moments, expected)


def test_a_weight_of_two_modules():
    torch.manual_seed(0)
    model, x = Tied(), tokens(B, 6)
    expected = loop(model, x)
    moments = collector(model)
    loss_of(model(x)).backward()
    assert_taken(moments, expected)


def test_autocast(net):
    model, x = net
    expected = loop(model, x)
    moments = collector(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(x).float())
    loss.backward()
    assert_taken(moments, expected, rtol=0.1)


@pytest.mark.parametrize("kind", ["linear", "linear over positions", "conv2d"])
def test_sums_keep_their_precision_in_a_backward_pass_under_autocast(kind):
    module, x = made(KINDS, kind)
    expected = loop(module, x)
    moments = collector(module)
    loss = loss_of(module(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert_taken(moments, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)), torch.randn(B, 4, requires_grad=True)
    expected = loop(model, x)
    moments = collector(model)
    loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()
    assert_taken(moments, expected)


# -- backward passes and steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["microbatch", "per_sample"])
def test_passes_of_one_step_add_up(net, moments):
    model, _ = net
    batches = [torch.randn(n, 2, 4, 4) for n in (3, 1, 4)]
    if moments == "per_sample":
        parts = [loop(model, x) for x in batches]
    else:
        named = dict(model.named_parameters())
        parts = [
            {n: g**2 for n, g in zip(named, torch.autograd.grad(loss_of(model(x)), list(named.values())))} for x in batches
        ]
    expected = {name: sum(part[name] for part in parts) for name in parts[0]}
    collected = collector(model, moments)
    for _ in range(2):  # steps
        for x in batches:
            loss_of(model(x)).backward()
        assert_taken(collected, expected)
        model.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("moments", ["microbatch", "per_sample"])
def test_zeroed_gradients_void_the_sums(net, moments, set_to_none):
    model, x = net
    expected = loop(model, x) if moments == "per_sample" else None
    collected = collector(model, moments)
    loss_of(model(torch.randn(9, 2, 4, 4))).backward()
    model.zero_grad(set_to_none=set_to_none)
    loss_of(model(x)).backward()
    assert_taken(collected, expected or {name: param.grad**2 for name, param in model.named_parameters()})


def test_microbatch_of_one_pass_is_the_gradient_squared(net):
    model, x = net
    collected = collector(model, "microbatch")
    loss_of(model(x)).backward()
    for name, param in model.named_parameters():
        assert (collected.take(name) == (param.grad**2).flatten().numpy()).all()


def test_microbatch_takes_anything_that_is_differentiated():
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "norm": nn.BatchNorm1d(4), "embedding": nn.Embedding(7, 3, sparse=True)})
    collected = collector(model, "microbatch")
    x = tokens(B, 6)
    model["norm"](model["lstm"](model["embedding"](x))[0].flatten(0, 1)).sin().sum().backward()
    for name, param in model.named_parameters():
        gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
        torch.testing.assert_close(torch.from_numpy(collected.take(name)), (gradient**2).flatten())


@pytest.mark.parametrize("otherwise", ["evaluation", "no backward", "autograd.grad", "failed forward", "failed backward"])
def test_nothing_is_left_of_passes_without_gradients(net, otherwise):
    model, x = net
    expected = loop(model, x)
    collected = collector(model)
    other = torch.randn(9, 2, 4, 4, requires_grad=True)
    if otherwise == "evaluation":
        model.eval()
        with torch.no_grad():
            model(other)
        model.train()
    elif otherwise == "no backward":
        model(other)
    elif otherwise == "autograd.grad":
        torch.autograd.grad(loss_of(model(other)), [other])
        torch.autograd.grad(loss_of(model(other)), [other, *model.parameters()])
        assert not any(watched.uses for watched in collected._params.values())
    elif otherwise == "failed forward":
        with pytest.raises(RuntimeError):
            model(other[:, :, :3])
    else:
        def fail(gradient):
            raise RuntimeError("on purpose")

        y = model.shared(torch.randn(9, 8))
        y.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model.shared(y).sum().backward()
        assert collected._params["shared.weight"].uses
    assert collected.take("out.weight") is None or otherwise == "failed backward"
    model.zero_grad()
    loss_of(model(x)).backward()
    assert_taken(collected, expected)


def test_a_graph_that_is_retained_counts_each_time(net):
    model, x = net
    expected = {name: 2 * sums for name, sums in loop(model, x).items()}
    collected = collector(model)
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_taken(collected, expected)


def test_frozen_and_unused_parameters(net):
    model, x = net
    model.extra = nn.Linear(3, 3)
    collected = collector(model)
    model.shared.weight.requires_grad_(False)
    loss_of(model(x)).backward()
    assert collected.take("shared.weight") is None and collected.take("extra.weight") is None
    expected = loop(model.out, torch.zeros(B, 2, 8)).keys()
    assert all(collected.take(f"out.{name}") is not None for name in expected)


def test_not_a_number_flows_through(net):
    model, x = net
    collected = collector(model)
    x[2, 0, 0, 0] = float("nan")
    loss_of(model(x)).backward()
    assert torch.from_numpy(collected.take("conv.weight")).isnan().any()


def test_a_batch_of_nothing():
    model = nn.Linear(4, 3)
    collected = collector(model)
    model(torch.zeros(0, 4)).sum().backward()
    assert not collected.take("weight").any() and not collected.take("bias").any()


# -- what stays of it ------------------------------------------------------------------------------------------------------


def test_inputs_live_as_long_as_autograd_keeps_them():
    model = nn.Linear(4, 4)
    collected = collector(model)

    def output():
        array = np.ones((B, 4), np.float32)
        return model(torch.from_numpy(array)), weakref.ref(array)

    y, kept = output()
    assert kept() is not None
    y.sum().backward()
    assert kept() is None, "although the output is alive"
    y, kept = output()
    del y
    assert kept() is None, "without a backward pass"
    assert not any(watched.uses for watched in collected._params.values())


@pytest.mark.parametrize("moments", ["microbatch", "per_sample"])
def test_hooks_go_with_the_collector(net, moments):
    model, x = net
    expected = loop(model, x)
    before = len(torch_modules._global_forward_hooks)
    first, second = collector(model, moments), collector(model)
    dead = weakref.ref(first)
    outputs = model(x)  # a graph that both have seen
    del first
    gc.collect()
    assert dead() is None
    loss_of(outputs).backward()
    assert_taken(second, expected)
    del second
    assert len(torch_modules._global_forward_hooks) == before
    loss_of(model(x)).backward()


def test_models_are_copied_and_pickled_as_without_it(net):
    model, x = net
    collected = collector(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other(x)).backward()
        assert collected.take("out.weight") is None
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


# -- errors ------------------------------------------------------------------------------------------------------------------


class Subclass(nn.Linear):
    pass


@pytest.mark.parametrize("module, words", [
    (nn.BatchNorm2d(3), ("layer.weight", "layer.bias", "BatchNorm2d")),
    (nn.LSTM(3, 4), ("layer.weight_ih_l0", "layer.bias_hh_l0", "of layer, LSTM")),
    (nn.MultiheadAttention(4, 2), ("layer.in_proj_weight", "MultiheadAttention", "layer.out_proj.weight")),
    (nn.ConvTranspose2d(2, 3, 2), ("layer.weight", "ConvTranspose2d")),
    (nn.Embedding(7, 3, sparse=True), ("layer.weight", "Embedding, sparse")),
    (nn.Embedding(7, 3, scale_grad_by_freq=True), ("Embedding, scale_grad_by_freq",)),
    (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), ("InstanceNorm1d, track_running_stats",)),
    (Subclass(3, 4), ("layer.weight", "Subclass")),
    (prune.identity(nn.Linear(3, 4), "weight"), ("layer.weight_orig",)),
    (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), ("ParametrizationList",)),
])
def test_modules_that_cannot_tell_samples_apart_are_named(module, words):
    model = nn.ModuleDict({"fine": nn.Linear(3, 3), "layer": module})
    with pytest.raises(ValueError, match="per_sample") as caught:
        collector(model)
    for word in (*words, "exclude=", "moments=microbatch"):
        assert word in str(caught.value)
    assert "fine" not in str(caught.value)
    collector(model, "microbatch")


def test_a_parameter_of_no_module_is_named():
    with pytest.raises(ValueError, match="lonely.*no module owns"):
        Moments("per_sample", {"lonely": nn.Parameter(torch.zeros(3))})


def test_a_parameter_that_is_used_past_its_module_is_named(net):
    model, x = net
    collected = collector(model)
    with pytest.raises(ValueError, match="out.weight.*no call of its module.*exclude="):
        nn.functional.linear(torch.ones(B, 8), model.out.weight).sum().backward()
    assert collected is not None


def test_uses_of_a_failed_pass_are_not_taken_for_the_next_one():
    model = nn.Linear(4, 4)
    collected = collector(model)

    def fail(gradient):
        raise RuntimeError("on purpose")

    hidden = model(torch.randn(B, 4))
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(hidden).sum().backward()
    assert all(watched.uses for watched in collected._params.values())
    with pytest.raises(ValueError, match="weight.*no call of its module"):
        nn.functional.linear(torch.ones(B, 4), model.weight).sum().backward()


def test_uses_with_different_batches_are_an_error():
    model = nn.Linear(4, 4)
    collected = collector(model)
    with pytest.raises(ValueError, match="(weight|bias) is used for batches of different sizes"):
        model(model(torch.randn(B, 4))[1:]).sum().backward()
    assert collected is not None
