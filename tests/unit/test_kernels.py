"""Every native kernel against the reference: bit for bit where the formulas leave no choice."""

import copy
import platform

import kernel_arguments
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_arguments import (
    BODIES,
    INSTRUCTIONS,
    KERNELS,
    Arguments,
    assert_same,
    body_of,
    native_only,
    trimmed,
    using,
)
from one_tensor import cpu, reference
from tiers import examples

from horovod_compress import kernels


@native_only
@pytest.mark.parametrize("name", KERNELS)
@examples(120)
@given(data=st.data())
def test_native_equals_the_reference(name, data):
    arguments = getattr(kernel_arguments, name)(Arguments(data))
    mine, its = copy.deepcopy(arguments), copy.deepcopy(arguments)
    with np.errstate(all="ignore"), using(data.draw(st.sampled_from(INSTRUCTIONS))):
        got, expected = getattr(cpu, name)(**mine), getattr(reference, name)(**its)
    # Not finite: what the body says does not count.
    if name in BODIES and expected.finite is False:
        got, expected = got.finite, expected.finite
    elif name == "encode_buckets":
        got, expected = trimmed(got), trimmed(expected)
    assert_same(got, expected)
    assert_same(list(mine.values()), list(its.values()))


@native_only
@pytest.mark.parametrize("name", ["dequantize", "decode_float16", "decode_signs"])
@examples(15)
@given(data=st.data(), more=st.sampled_from([0, 1, 63, 64, 1000]), offset=st.integers(0, 17))
def test_large_outputs_begin_and_end_anywhere(name, data, more, offset):
    """They are written past the caches, whole vectors at a time."""
    a = Arguments(data)
    a.size = 2**18 + more
    arguments = getattr(kernel_arguments, name)(a)
    memory = np.full(a.size + 32, 7, np.float32)
    out = memory[offset:][: a.size]
    with np.errstate(all="ignore"), using(data.draw(st.sampled_from(INSTRUCTIONS))):
        got, expected = (
            getattr(k, name)(**{**arguments, "out": to})
            for k, to in ((cpu, out), (reference, arguments["out"]))
        )
    assert_same(got, expected)
    np.testing.assert_array_equal(out, arguments["out"])
    assert (np.delete(memory, np.s_[offset : offset + a.size]) == 7).all()


def test_no_coefficient_is_sent_where_none_is_wanted():
    """Infinite ones neither: the products of 16 elements below 2^110 with rows of 2^20 are."""
    large, rows = np.full(16, 2.0**109, np.float32), np.full((4, 4), 2.0**20, np.float32)
    for k in cpu, reference:
        with np.errstate(over="ignore"):
            encoded = k.encode_dct(
                np.zeros(16, np.float32),
                large.copy(),
                rows.ravel(),
                rows.ravel(),
                width=4,
                k=0,
                decay=1.0,
                kind="fp32",
            )
        assert (encoded.elements, encoded.finite) == (0, True)


def test_nothing_finite_becomes_infinite_in_bfloat16():
    largest = np.finfo(np.float32).max
    for k in cpu, reference:
        out = np.zeros(2, np.float32)
        body = k.encode_bf16(np.float32([largest, -largest])).body
        assert k.decode_add_bf16(out, body, scale=1.0) and out[0] == -out[1] > 3.3e38


def test_what_is_left_of_large_coefficients_stays_far_below_the_limit():
    """So that rounding alone never takes a residual to the limit, 2^110."""
    for k in cpu, reference:
        residual = np.float32([1.9 * 2.0**109, -1.8 * 2.0**109, 1, 0])
        same = np.eye(2, dtype=np.float32).ravel()
        encoded = k.encode_dct(
            np.zeros(4, np.float32), residual, same, same, width=2, k=1, decay=1.0, kind="fp32"
        )
        assert encoded.finite and residual.tolist() == [0, -(2.0**109), 1, 0]


@pytest.mark.parametrize("share", [0.5, 0.03, 0.99])
def test_elements_that_share_a_draw_round_independently(share):
    """Of a word's ten codes, and of eight elements of a block of natural's, any two are
    uncorrelated, and each mean is right."""
    words, size = 64 * 3000, 8 * 64 * 3000
    codes = cpu.quantize(
        np.full(10 * words, share, np.float32),
        None,
        w=np.float32([1]),
        clip=1.0,
        steps=[1.0],
        width=3,
        size=1,
        key=12345,
    )
    codes = reference.quantization.unpack(codes, 10 * words, 3, 0, 1)
    powers = np.zeros(size, np.float32)
    reference.decode_add_natural(
        powers,
        body_of(cpu.encode_natural(np.full(size, 1 + share, np.float32), key=12345)),
        scale=1.0,
    )
    for drawn in codes.reshape(-1, 10, 64), powers.reshape(-1, 8, 64) - 1:
        drawn = drawn.swapaxes(0, 1).reshape(drawn.shape[1], -1)
        sigma = 1 / np.sqrt(drawn.shape[1])
        assert np.abs(drawn.mean(axis=1) - share).max() < 4.5 * sigma * np.sqrt(share * (1 - share))
        assert np.abs(np.corrcoef(drawn) - np.eye(len(drawn))).max() < 4.5 * sigma


def test_small_halves_survive_in_threads_that_flush_denormals():
    """TensorFlow's do. The mode is the thread's, and is given back."""
    halves = np.array([1, 2, 500, 1023], np.uint16)  # below 2^-14
    out = np.empty(4, np.float32)
    flushing = 0x8040 if platform.machine() == "x86_64" else 1 << 24
    before = cpu.flush_denormals(mode=flushing)
    try:
        assert cpu.flush_denormals(mode=0) == (flushing if kernels.backend == "native" else 0)
        cpu.decode_float16(halves, out)
    finally:
        cpu.flush_denormals(mode=before)
    np.testing.assert_array_equal(out, halves.view(np.float16).astype(np.float32))
