"""The kernel that squares and sums what samples contribute to a product: the native one against
NumPy's, on any strides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from horovod_compress import kernels
from horovod_compress.kernels import cpu, reference

pytestmark = pytest.mark.skipif(
    kernels.backend != "native", reason="compares native kernels, which were not built"
)
sizes = st.integers(1, 40)


def filled(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def compare(left, right, with_sums):
    numel = left[0].size // np.prod(right.shape[1:-1], dtype=int) * right.shape[-1]
    results = []
    for module in (cpu, reference):
        squares, sums = (
            np.ones(numel, np.float32),
            np.full(numel, 2, np.float32) if with_sums else None,
        )
        module.add_sample_squares(left, right, squares, sums)
        results.append((squares, sums))
    for mine, theirs in zip(*results):
        if mine is not None:
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@examples(60)
@given(
    st.integers(0, 2**32),
    st.integers(0, 5),
    sizes,
    sizes,
    sizes,
    st.sampled_from(["plain", "places first", "columns first"]),
    st.booleans(),
)
def test_matrices(seed, samples, places, rows, columns, layout, with_sums):
    rng = np.random.default_rng(seed)
    order = {"plain": (0, 1, 2), "places first": (1, 0, 2), "columns first": (0, 2, 1)}[layout]
    left, right = (
        filled(rng, *(shape[d] for d in order)).transpose(np.argsort(order))
        for shape in ((samples, places, rows), (samples, places, columns))
    )
    if samples:
        compare(left, right, with_sums)
    else:
        squares = np.ones(rows * columns, np.float32)
        cpu.add_sample_squares(left, right, squares)
        assert (squares == 1).all()


@examples(40)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_windows_that_overlap(seed, channels, outputs, size, stride, samples):
    rng = np.random.default_rng(seed)
    x = filled(rng, samples, channels, size + 2 * stride, size + stride)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))[
        :, :, ::stride, ::stride
    ]
    windows = np.moveaxis(windows, 1, 3)
    compare(windows, np.moveaxis(filled(rng, samples, outputs, *windows.shape[1:3]), 1, -1), True)


def test_shapes_that_do_not_fit_are_refused():
    left, right = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 5), np.float32)
    for its_left, its_right, numel in (
        (left, right, 19),
        (left[:1], right, 20),
        (left[:, :2], right, 20),
        (left, right[0, 0], 20),
    ):
        with pytest.raises(ValueError):
            cpu.add_sample_squares(its_left, its_right, np.zeros(numel, np.float32))
    with pytest.raises(TypeError):
        cpu.add_sample_squares(left.astype(np.float64), right, np.zeros(20, np.float32))
