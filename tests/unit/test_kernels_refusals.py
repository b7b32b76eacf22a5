"""Arguments that native kernels refuse, and memory of earlier steps that they take."""

import copy

import kernel_arguments
import numpy as np
import pytest
from kernel_arguments import KERNELS, KEYS, Arguments, assert_same, native_only, sizes, trimmed
from one_tensor import cpu

from horovod_compress.kernels import HEADROOM


class Fixed:
    """A `data` that always draws what makes many arguments: kernels get one typical call."""

    def draw(self, strategy):
        return {id(sizes): 100, id(KEYS): 12345}.get(id(strategy), 7)


def typical(name):
    a = Arguments(Fixed())
    a.one_of = lambda *choices: choices[-1]
    return getattr(kernel_arguments, name)(a)


ONE_LENGTH_OF_SEVERAL = {
    "take_entries": ["u", "v"],
    "scatter_add": ["values", "indices"],
    "encode_strom": ["grad", "residual"],
    "encode_variance": ["grad", "squares", "r", "v"],
    "encode_adacomp": ["grad", "residual"],
    "encode_float16": ["x", "half"],
    "decode_float16": ["half", "out"],
    "decode_add_bf16": ["out", "body"],
    "encode_one_bit": ["grad", "residual"],
    "decode_add_one_bit": ["body"],
    "decode_add_natural": ["body"],
    "decode_add_sparse": ["body"],
    "decode_sparse": ["body"],
    "decode_add_buckets": ["body"],
    "apply_momentum": ["out", "u", "new_u"],
    "quantize": ["levels", "w"],
    "norms": ["peaks"],
    "encode_scales": ["peaks", "w"],
    "dequantize": ["words", "levels", "w"],
    "decode_signs": ["words"],
    "move": ["x", "out"],
    "add_up": ["out"],
}
WRITTEN = {
    "take_entries": ["v", "u"],
    "scatter_add": ["out"],
    "decode_add_sparse": ["out"],
    "encode_strom": ["grad", "residual"],
    "encode_variance": ["grad", "r", "v"],
    "encode_adacomp": ["grad", "residual"],
    "encode_float16": ["half"],
    "decode_float16": ["out"],
    "encode_bf16": ["grad"],
    "decode_add_bf16": ["out"],
    "encode_one_bit": ["grad", "residual"],
    "decode_add_one_bit": ["out"],
    "encode_natural": ["grad"],
    "decode_add_natural": ["out"],
    "encode_buckets": ["grad"],
    "decode_add_buckets": ["out"],
    "apply_momentum": ["out", "new_u"],
    "norms": ["peaks"],
    "dequantize": ["out"],
    "decode_signs": ["out"],
    "move": ["x", "out"],
    "add_up": ["out"],
}


def frozen(array):
    array.flags.writeable = False
    return array


@native_only
@pytest.mark.parametrize("name", KERNELS)
def test_arrays_that_do_not_fit_are_refused(name):
    getattr(cpu, name)(**typical(name))
    for argument, value in typical(name).items():
        if not isinstance(value, np.ndarray):
            continue
        same_width = np.dtype(f"{'i' if value.dtype.kind != 'i' else 'u'}{value.itemsize}")
        wrong = [
            value.astype(np.float64),
            value.view(same_width),
            value.reshape(1, -1),
        ]
        # A single number is contiguous.
        wrong += [np.repeat(value, 2)[::2]] if value.size > 1 else []
        wrong += [value.tolist(), None]
        if argument in ONE_LENGTH_OF_SEVERAL.get(name, []):
            wrong += [np.append(value, value[:1]), value[:-1]]
        if argument in WRITTEN.get(name, []):
            wrong.append(frozen(value.copy()))
        for array in wrong:
            if (
                array is None
                and argument in ("u", "squares")
                or (name, argument) == ("norms", "peaks")
                and array is None
            ):
                continue
            with pytest.raises((ValueError, TypeError)):
                getattr(cpu, name)(**{**typical(name), argument: array})


NINE = [1.0] * 9  # scales


@native_only
@pytest.mark.parametrize(
    "name, wrong",
    [
        ("take_entries", {"kind": "fp8"}),
        ("take_entries", {"indices": np.array([100], np.uint32)}),
        ("scatter_add", {"indices": np.array([100], np.uint32), "values": np.ones(1, np.float32)}),
        ("encode_adacomp", {"bin_length": 0}),
        ("encode_adacomp", {"bin_length": -1}),
        ("encode_adacomp", {"bin_length": 1.5}),
        ("encode_adacomp", {"sent": np.array([100], np.uint32)}),
        ("encode_buckets", {"bucket": 0}),
        ("encode_buckets", {"steps": 0}),
        ("encode_buckets", {"steps": 32768}),
        ("decode_add_buckets", {"bucket": 0}),
        ("decode_add_buckets", {"steps": 0}),
        ("decode_add_buckets", {"steps": 32768}),
        ("draw_coordinates", {"count": 101}),
        ("draw_coordinates", {"first": 90, "count": 11}),
        ("draw_coordinates", {"first": 2**63, "count": 2**63}),
        ("draw_coordinates", {"numel": 2**32}),
        ("draw_coordinates", {"first": -1}),
        ("draw_coordinates", {"key": -1}),
        ("draw_coordinates", {"key": 2**64}),
        ("encode_natural", {"key": 2**64}),
        ("random_bits", {"key": -1}),
        ("random_bits", {"key": 2**64}),
        ("random_bits", {"n": -1}),
        ("quantize", {"width": 0}),
        ("quantize", {"width": 65}),
        ("quantize", {"width": -1}),
        ("quantize", {"steps": []}),
        ("quantize", {"steps": NINE}),
        ("quantize", {"levels": None}),
        ("quantize", {"size": 0}),
        ("dequantize", {"width": 0}),
        ("dequantize", {"width": 65}),
        ("dequantize", {"steps": []}),
        ("dequantize", {"levels": None}),
        ("dequantize", {"steps": NINE}),
        ("dequantize", {"size": 0}),
        ("dequantize", {"size": -1}),
        ("encode_scales", {"size": 0}),
        ("encode_scales", {"size": 2**63}),
        ("encode_scales", {"steps": []}),
        ("encode_scales", {"steps": NINE}),
        ("encode_signs", {"width": 0}),
        ("encode_signs", {"width": 65}),
        ("decode_signs", {"width": 0}),
        ("decode_signs", {"width": 65}),
        ("decode_sparse", {"numel": -1}),
        ("seal_frame", {"size": HEADROOM}),
        ("seal_frame", {"finite": [True]}),
        ("seal_frame", {"buffers": [], "finite": []}),
        ("seal_frame", {"buffers": [np.zeros(HEADROOM, np.uint8)] * 5}),
        ("seal_frame", {"buffers": [np.zeros(HEADROOM + 1, np.int8)] * 5}),
        ("seal_frame", {"buffers": [np.zeros((1, HEADROOM + 1), np.uint8)] * 5}),
        ("open_frames", {"tensors": 0}),
        ("open_frames", {"tensors": 4}),
    ],
)
def test_numbers_out_of_range_are_refused(name, wrong):
    with pytest.raises((ValueError, TypeError)):
        getattr(cpu, name)(**{**typical(name), **wrong})


@native_only
@pytest.mark.parametrize(
    "name",
    [
        "encode_bf16",
        "encode_one_bit",
        "encode_natural",
        "encode_buckets",
        "quantize",
        "encode_scales",
        "encode_signs",
    ],
)
def test_spare_memory_changes_nothing(name):
    """A buffer of an earlier step is used again where it fits, whatever is in it, and left alone
    where it does not."""
    kernel = getattr(cpu, name)

    def memory_of(result):
        return (
            result
            if isinstance(result, np.ndarray)
            else result.undo[0]
            if name == "encode_buckets"
            else result.buffer
        )

    first = kernel(**typical(name))
    buffer = memory_of(first)
    for spare, fits in ((buffer.copy(), True), (buffer[:-1].copy(), False)):
        # A body's padding is never written.
        spare.view(np.uint8)[: None if buffer.dtype != np.uint8 else -1] = 0xA5
        kept = spare.copy()
        again = kernel(**typical(name), spare=spare)
        if name == "encode_buckets":
            assert_same(trimmed(again), trimmed(first))
        else:
            assert_same(again, first)
        assert np.shares_memory(memory_of(again), spare) == fits
        assert fits or np.array_equal(spare, kept)


@native_only
def test_variance_takes_the_memory_of_an_earlier_step():
    """Where its entries fit there, whatever is in it; else its own."""
    r = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    zeros = np.zeros(100, np.float32)
    arguments = dict(
        grad=zeros, squares=None, r=r, v=zeros, alpha=1.0, zeta=0.9, tau=0.0, error_feedback=False
    )
    expected = cpu.encode_variance(**copy.deepcopy(arguments))
    count = expected.elements
    assert count > 20
    for entries, fits in ((2 * count, True), (count, True), (count // 3, False)):
        spare = np.full(3 * entries, 0xA5A5A5A5, np.uint32)[:entries]
        got = cpu.encode_variance(**copy.deepcopy(arguments), spare=spare)
        assert_same(got, expected)
        assert (
            np.shares_memory(got.undo[0], spare)
            == np.shares_memory(got.undo[1], spare.base)
            == fits
        )
        again = cpu.encode_variance(**copy.deepcopy(arguments), spare=got.undo[0])
        assert_same(again, expected)
        assert np.shares_memory(again.undo[0], got.undo[0])
    for spare in (
        got.undo[0].copy(),
        frozen(np.zeros(3 * count, np.uint32))[:count],
        np.zeros(3 * count, np.float32).view(np.uint32)[:count],
    ):
        assert_same(cpu.encode_variance(**copy.deepcopy(arguments), spare=spare), expected)
