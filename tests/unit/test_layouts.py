"""Shapes of PyTorch's and Keras' layers: what a compression makes of a layer does not depend on how
a framework lays it out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import ranks_of
from tiers import examples

import horovod_compress as hc
from horovod_compress.engine.dense_policy import compressor_for
from horovod_compress.engine.lockstep import run_step
from horovod_compress.tools import bench
from horovod_compress.tools.models import MODELS


def in_keras(shape):
    """A layer's shape in Keras: extents in space first, outputs last. A depthwise convolution has
    the outputs of each channel last."""
    if len(shape) < 2:
        return shape
    out, into, *space = shape
    return (*space, out, 1) if space and into == 1 else (*space, into, out)


# -- powersgd: the matrix that a tensor is taken for


def factors(shape, rank):
    """(rows, columns, floats of P and Q): what is in fact kept for them."""
    state = hc.get_compressor(f"powersgd:min_rate=0,min_numel=0,rank={rank}").init("t", shape)
    p, q, r = state.p.size, state.arrays["q"].size, state.rank
    return p // r, q // r, p + q


@examples(100)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(1, 8))
def test_powersgd_takes_the_split_that_sends_least(shape, rank):
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    n, m, floats = factors(tuple(shape), rank)
    assert (n, m) in splits
    assert floats == min(min(rank, n, m) * (n + m) for n, m in splits)
    # What it always took before: PyTorch's outputs by all else.
    first = splits[0]
    assert floats <= min(rank, *first) * sum(first)


@pytest.mark.parametrize(
    "pytorch, keras",
    [
        ((64, 3, 7, 7), (7, 7, 3, 64)),
        ((512, 256, 3, 3), (3, 3, 256, 512)),
        ((2048, 512, 1, 1), (1, 1, 512, 2048)),
        ((96, 1, 3, 3), (3, 3, 96, 1)),
        ((64, 32, 3, 3, 3), (3, 3, 3, 32, 64)),
        ((128, 64, 5), (5, 64, 128)),
        ((1000, 2048), (2048, 1000)),
    ],
)
def test_powersgd_sends_the_same_of_a_layer_in_both_layouts(pytorch, keras):
    (n, m, floats), (its_n, its_m, its_floats) = factors(pytorch, 4), factors(keras, 4)
    assert floats == its_floats and {n, m} == {its_n, its_m}


@pytest.mark.parametrize("model, published", [("resnet50", 66.5), ("mobilenetv2", 23.4)])
def test_powersgds_ratio_on_models_in_both_layouts(model, published):
    """All bytes counted."""
    for layout in (tuple, in_keras):
        gradients = [{n: np.ones(layout(s), np.float32) for n, s in MODELS[model]().items()}]
        ratio = bench.measure(hc.get_compressor("powersgd"), gradients, 2, 1)["ratio"]
        assert ratio == pytest.approx(published, rel=0.01)


def test_powersgd_refuses_a_state_of_another_split():
    """A state from before splits were chosen: Keras' kernel was 3 rows."""
    shapes = {"conv": (3, 3, 64, 128)}
    (exchange,) = ranks_of("powersgd", 1, shapes)
    run_step([exchange], [{"conv": np.ones(3 * 3 * 64 * 128, np.float32)}])
    state = exchange.state_dict()
    state["tensors"]["conv"]["q"] = np.zeros(3 * 3 * 64 * 128, np.float32)
    kept = exchange.state_dict()
    with pytest.raises(ValueError, match="this state does not fit: conv.q"):
        exchange.load_state_dict(state)
    np.testing.assert_array_equal(exchange.arrays()["conv"]["q"], kept["tensors"]["conv"]["q"])


# -- adacomp: what counts as a convolution

CONVOLUTIONS = {
    "PyTorch": [
        # Conv2d.
        (64, 3, 7, 7),
        (512, 512, 3, 3),
        (256, 64, 1, 1),
        (96, 1, 3, 3),
        (192, 3, 16, 16),
        (64, 1, 31, 31),
        (64, 3, 7, 1),
        # Conv1d.
        (128, 64, 3),
        (512, 512, 2),
        (512, 512, 10),
        (512, 1, 4),
        (512, 1, 31),
        (64, 1, 25),
        (64, 3, 3, 7, 7),
        (32, 16, 3, 3, 3),  # Conv3d
    ],
    "Keras": [
        # Conv2D, DepthwiseConv2D.
        (7, 7, 3, 64),
        (3, 3, 512, 512),
        (1, 1, 64, 256),
        (3, 3, 96, 1),
        (16, 16, 3, 768),
        (1, 7, 64, 64),
        # Conv1D, DepthwiseConv1D.
        (3, 64, 128),
        (5, 512, 512),
        (9, 80, 256),
        (25, 1, 64),
        (3, 512, 1),
        (31, 512, 1),
        (3, 7, 7, 3, 64),
        (3, 3, 3, 16, 32),  # Conv3D
    ],
}
OTHERS = {
    "attention kernels of Keras": [
        (512, 8, 64),
        (8, 64, 512),
        (8, 64),
        (768, 12, 64),
        (12, 64, 768),
        (192, 3, 64),
        (3, 64, 192),
        (1024, 16, 64),
        (256, 4, 32),
        (4, 32, 256),
        (32, 2, 32),
        (2, 32, 32),
        (64, 8, 8),
        (8, 8, 64),
        (768, 1, 768),
        (1, 768, 768),
        (512, 3, 8, 64),
    ],
    "linear layers, embeddings, recurrent layers": [
        (1000, 2048),
        (30522, 768),
        (6000, 1500),
        (512, 2048),
        (3, 3072),
        (5, 5),
        (4096,),
        (),
    ],
    "experts, tables of positions": [(8, 512, 2048), (1, 196, 768), (64, 1024, 4096)],
}


@pytest.mark.parametrize("shape", [shape for shapes in CONVOLUTIONS.values() for shape in shapes])
def test_adacomp_cuts_convolutions_into_bins_of_50(shape):
    assert compressor_for(hc.get_compressor("adacomp:min_numel=0"), "t", shape).bin_length == 50


@pytest.mark.parametrize("shape", [shape for shapes in OTHERS.values() for shape in shapes])
def test_adacomp_cuts_all_else_into_bins_of_500(shape):
    assert compressor_for(hc.get_compressor("adacomp:min_numel=0"), "t", shape).bin_length == 500


def test_adacomp_takes_known_models_alike_in_both_layouts():
    for model in ("resnet50", "mobilenetv2"):
        for tensor, its in MODELS[model]().items():
            for shape in (its, in_keras(its)):
                chosen = compressor_for(hc.get_compressor("adacomp:min_numel=0"), tensor, shape)
                assert chosen.bin_length == (50 if len(shape) == 4 else 500)
    assert (
        compressor_for(hc.get_compressor("adacomp:bin_length=77"), "t", (3, 3, 64, 64)).bin_length
        == 77
    )


@pytest.mark.parametrize(
    "name",
    [
        "conv.weight",
        "_orig_mod.conv.weight",
        "conv._orig_mod.weight",
        "_orig_mod.conv._orig_mod.weight",
    ],
)
def test_patterns_are_of_names_as_they_are_where_nothing_is_compiled(name):
    for pattern in ("conv.*", "conv.weight", name, "*_orig_mod*"):
        compressor = hc.get_compressor(f"topk:exclude={pattern},min_numel=0")
        dense = pattern != "*_orig_mod*" or "_orig_mod" in name
        assert (compressor_for(compressor, name, (40, 40)).id != "topk") == dense, pattern
    other = hc.get_compressor("topk:exclude=weight+x.conv*,min_numel=0")
    assert compressor_for(other, name, (40, 40)).id == "topk"
