"""Sums over samples of squared gradients: what becomes of passes that end otherwise, what stays,
errors."""

import copy
import gc
import itertools
import pickle
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from moments_checks import B, Net, assert_taken, collector, loop, loss_of, tokens  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as torch_modules  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from horovod_compress.torch_common.moments import Moments  # noqa: E402


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


@pytest.mark.parametrize("moments", ["per_sample", "microbatch"])
def test_a_model_that_is_moved_is_told(net, moments):
    model, x = net
    name, its = next(iter(dict(model.named_parameters()))), collector(model, moments)
    loss_of(model(x)).backward()
    assert its.take(name) is not None and its.take(name) is None
    model.double().zero_grad()
    loss_of(model(x.double())).backward()
    with pytest.raises(RuntimeError, match=f"{name} was moved to another device or type"):
        its.take(name)


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.LayerNorm(6)),
        torch.randn(B, 4, requires_grad=True),
    )
    expected = loop(model, x)
    moments = collector(model)
    loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()
    assert_taken(moments, expected)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(B, 3)
    expected = loop(model, x)
    moments = collector(model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        loss_of(compiled(x)).backward()
        assert_taken(moments, expected)
        model.zero_grad()


# -- backward passes and steps


@pytest.mark.parametrize("moments", ["microbatch", "per_sample"])
def test_passes_of_one_step_add_up(net, moments):
    model, _ = net
    batches = [torch.randn(n, 2, 4, 4) for n in (3, 1, 4)]
    if moments == "per_sample":
        parts = [loop(model, x) for x in batches]
    else:
        named = dict(model.named_parameters())
        parts = [
            {
                n: g**2
                for n, g in zip(named, torch.autograd.grad(loss_of(model(x)), list(named.values())))
            }
            for x in batches
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
    assert_taken(
        collected, expected or {name: param.grad**2 for name, param in model.named_parameters()}
    )


def test_microbatch_of_one_pass_is_the_gradient_squared(net):
    model, x = net
    collected = collector(model, "microbatch")
    loss_of(model(x)).backward()
    for name, param in model.named_parameters():
        assert (collected.take(name) == (param.grad**2).flatten().numpy()).all()


def test_groups_of_samples_estimate_the_sum_over_samples_without_bias():
    """The formula of decision 030, over all ways in which 6 samples fall into 3 passes of 2."""
    samples = torch.randn(6, 10, dtype=torch.float64)
    total = samples.sum(0)
    estimates = []
    for order in itertools.permutations(range(6)):
        squares = samples[list(order)].view(3, 2, 10).sum(1).square().sum(0)
        estimates.append((squares * (6 - 1) - total**2 * (2 - 1)) / (6 - 2))
        assert (estimates[-1] >= total**2 / 6 - 1e-12).all()
    torch.testing.assert_close(torch.stack(estimates).mean(0), samples.square().sum(0))


def test_microbatch_takes_anything_that_is_differentiated():
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(3, 4),
            "norm": nn.BatchNorm1d(4),
            "embedding": nn.Embedding(7, 3, sparse=True),
        }
    )
    collected = collector(model, "microbatch")
    x = tokens(B, 6)
    model["norm"](model["lstm"](model["embedding"](x))[0].flatten(0, 1)).sin().sum().backward()
    for name, param in model.named_parameters():
        gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
        torch.testing.assert_close(torch.from_numpy(collected.take(name)), (gradient**2).flatten())


@pytest.mark.parametrize(
    "otherwise", ["evaluation", "no backward", "autograd.grad", "failed forward", "failed backward"]
)
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


# -- what stays of it


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


# -- errors


class Subclass(nn.Linear):
    pass


@pytest.mark.parametrize(
    "module, words",
    [
        (nn.BatchNorm2d(3), ("layer.weight", "layer.bias", "BatchNorm2d")),
        (nn.Bilinear(3, 3, 4), ("layer.weight", "layer.bias", "of layer, Bilinear")),
        (nn.LSTM(3, 4), ("layer.weight_ih_l0", "layer.bias_hh_l0", "of layer, LSTM")),
        (nn.GRUCell(3, 4), ("layer.weight_ih", "of layer, GRUCell")),
        (nn.MultiheadAttention(4, 2), ("layer.in_proj_weight", "of layer, MultiheadAttention")),
        (
            nn.TransformerEncoderLayer(4, 2, 8),
            ("layer.self_attn.in_proj_weight", "of layer.self_attn, MultiheadAttention"),
        ),
        (nn.ConvTranspose2d(2, 3, 2), ("layer.weight", "ConvTranspose2d")),
        (nn.Embedding(7, 3, sparse=True), ("layer.weight", "Embedding, sparse")),
        (nn.Embedding(7, 3, scale_grad_by_freq=True), ("Embedding, scale_grad_by_freq",)),
        (
            nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            ("InstanceNorm1d, track_running_stats",),
        ),
        (Subclass(3, 4), ("layer.weight", "Subclass")),
        (prune.identity(nn.Linear(3, 4), "weight"), ("layer.weight_orig",)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), ("ParametrizationList",)),
    ],
)
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


def test_batches_that_are_not_the_samples_are_an_error():
    model = nn.ModuleDict({"first": nn.Linear(3, 4), "out": nn.Linear(4, 2)})
    moments = collector(model)
    with pytest.raises(
        ValueError, match=f"first.* is used for 6 samples and out.* for {B}.*first dimension"
    ):
        model["out"](model["first"](torch.randn(6, B, 3)).transpose(0, 1)).sum().backward()
    assert moments is not None


def test_uses_with_different_batches_are_an_error():
    model = nn.Linear(4, 4)
    collected = collector(model)
    with pytest.raises(ValueError, match="(weight|bias) is used for batches of different sizes"):
        model(model(torch.randn(B, 4))[1:]).sum().backward()
    assert collected is not None
