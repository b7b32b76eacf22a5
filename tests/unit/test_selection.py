"""Selection: how many, which ones, and the native kernels against the reference."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_arguments import VALUES, assert_same
from one_tensor import cpu, reference
from tiers import examples

from horovod_compress import kernels
from horovod_compress.kernels import HEADROOM
from horovod_compress.kernels.reference import selection

RNG = np.random.default_rng(7)
native_only = pytest.mark.skipif(
    kernels.backend != "native", reason="compares the native kernels, which were not built"
)


def select(v, ratio, sample_ratio=0.005, offset=0):
    """Indices chosen from |v| by the kernel in use, through an update that leaves v as it is."""
    k = math.ceil(ratio * v.size)
    kept, samples = v.copy(), int(sample_ratio * v.size) + 256
    encoded = cpu.encode_topk(
        np.zeros_like(v), None, kept, k=k, samples=samples, offset=offset, kind="fp32"
    )
    indices, (values,) = encoded.undo
    assert encoded.finite and not kept[indices].any()
    kept[indices] = values
    assert np.array_equal(kept, v)
    return indices, k


D = 200_000
DISTRIBUTIONS = {
    "normal": RNG.standard_normal(D),
    "heavy-tailed": RNG.standard_cauchy(D),
    "log-normal": np.exp(4 * RNG.standard_normal(D)),
    "constant": np.full(D, -0.25),
    "ascending": np.arange(1, D + 1) / D,
    "descending": np.arange(D, 0, -1) / D,
    "two values": np.where(RNG.random(D) < 0.3, 1.0, 0.5),
    "blocks": np.repeat(RNG.standard_normal(D // 1000), 1000),
    "huge at the end": np.concatenate(
        [RNG.standard_normal(D - 900), 1e6 * RNG.standard_normal(900)]
    ),
    "denormal": 1e-41 * RNG.standard_normal(D),
    "12 orders": 10.0 ** RNG.uniform(-6, 6, D),
}


@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_exactly_the_largest_are_chosen_and_of_equal_ones_the_first(name, ratio):
    """Wherever the sample lies, also where it misleads."""
    v = DISTRIBUTIONS[name].astype(np.float32)
    for offset in range(3):
        indices, k = select(v, ratio, offset=offset)
        available = min(k, np.count_nonzero(v))
        largest = np.sort(np.argsort(-np.abs(v), kind="stable")[:available])
        np.testing.assert_array_equal(indices, largest)


def test_single_elements_and_zeros():
    for size in (1, 2, 5, 63, 64, 65):
        v = np.zeros(size, np.float32)
        assert len(select(v, 0.001)[0]) == 0
        v[-1] = -3
        assert select(v, 0.001)[0].tolist() == [size - 1]


@pytest.mark.parametrize("k, chunk", [(1, 7), (64, 4096), (1000, 1000), (5, 1_000_000)])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_of_each_chunk_exactly_the_largest_are_chosen_and_of_equal_ones_the_first(name, k, chunk):
    v = DISTRIBUTIONS[name].astype(np.float32)[:50_000]
    v[20_000:30_000] = 0
    encoded = cpu.encode_topk(
        np.zeros_like(v),
        None,
        v.copy(),
        k=k,
        samples=0,
        offset=0,
        chunk=min(chunk, v.size),
        kind="fp32",
    )
    # By chunk, magnitude, place.
    order = np.lexsort((np.arange(v.size), -np.abs(v), np.arange(v.size) // chunk))
    rank = np.empty(v.size, np.int64)
    rank[order] = np.arange(v.size) - np.arange(v.size) // chunk * chunk
    np.testing.assert_array_equal(encoded.undo[0], np.flatnonzero((rank < k) & (v != 0)))
    assert encoded.finite


@native_only
@examples(200)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3000),
    chunk=st.integers(1, 3000),
    data=st.data(),
)
def test_native_choice_in_chunks_equals_the_reference(seed, size, chunk, data):
    rng = np.random.default_rng(seed)
    v = (
        rng.standard_normal(size) * 10.0 ** rng.uniform(-4, 4, size)
        if data.draw(st.booleans())
        else rng.integers(-3, 4, size)
    )
    grad, u, v = (
        rng.standard_normal(size).astype(np.float32),
        np.zeros(size, np.float32),
        v.astype(np.float32),
    )
    k = data.draw(st.integers(0, min(size, chunk)))
    options = dict(momentum=0.5, k=k, samples=0, offset=0, chunk=chunk, kind="fp32")
    results = [
        module.encode_topk(grad.copy(), u.copy(), v.copy(), **options)
        for module in (cpu, reference)
    ]
    assert_same(*results)


def test_few_nonzero_elements_are_all_sent():
    v = np.zeros(D, np.float32)
    v[[5, 77_777, D - 1]] = 1, -2, 1e-30
    assert select(v, 0.001)[0].tolist() == [5, 77_777, D - 1]


def test_a_constant_gradient_reaches_every_element():
    """Trimming must not prefer one end for ever: what was sent is 0, the others have grown."""
    v, seen = np.zeros(1000, np.float32), np.zeros(1000, bool)
    for step in range(10):
        encoded = cpu.encode_topk(
            np.ones_like(v), None, v, k=100, samples=256, offset=step, kind="fp32"
        )
        seen[encoded.undo[0]] = True
    assert seen.all()


@native_only
@examples(200)
@given(data=st.data(), momentum=st.sampled_from(["none", "vanilla", "nesterov"]))
def test_native_updates_equal_the_reference_bit_for_bit(data, momentum):
    size = data.draw(st.integers(1, 300))
    floats = hnp.arrays(
        np.float32, size, elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
    )
    finite = hnp.arrays(
        np.float32, size, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
    grad, u, v = data.draw(floats), data.draw(finite), data.draw(finite)
    if momentum == "none":
        u = None
    k = data.draw(st.integers(0, size))
    scale, base = (
        data.draw(st.sampled_from([1.0, 0.5, 0.1])),
        data.draw(st.one_of(st.none(), finite)),
    )
    options = dict(momentum=0.9, nesterov=momentum == "nesterov", scale=scale, base=base)
    choice = dict(k=k, samples=256, offset=3, kind="fp32")
    for name, more in (("add_to_residual", {}), ("encode_topk", choice)):
        copies = [(grad.copy(), None if u is None else u.copy(), v.copy()) for _ in range(2)]
        results = [
            getattr(module, name)(*arrays, **options, **more)
            for module, arrays in zip((cpu, reference), copies)
        ]
        (left, native_u, native_v), (_, reference_u, reference_v) = copies
        np.testing.assert_array_equal(left, np.zeros(size) if base is None else base)
        np.testing.assert_array_equal(native_v, reference_v)
        if u is not None:
            np.testing.assert_array_equal(native_u, reference_u)
        assert_same(*results)
        assert np.isfinite(native_v).all()


@native_only
@examples(100)
@given(data=st.data(), kind=st.sampled_from(VALUES))
def test_native_bodies_of_what_was_taken_equal_the_reference(data, kind):
    size = data.draw(st.integers(1, 200))
    finite = hnp.arrays(
        np.float32, size, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
    v, u = data.draw(finite), data.draw(finite)
    indices = np.flatnonzero(data.draw(hnp.arrays(bool, size))).astype(np.uint32)
    mine, theirs = (v.copy(), u.copy()), (v.copy(), u.copy())
    masked = data.draw(st.integers(0, size))
    taken = cpu.take_entries(indices, *mine, kind=kind, masked=masked)
    assert_same(taken, reference.take_entries(indices, *theirs, kind=kind, masked=masked))
    np.testing.assert_array_equal(mine, theirs)
    indices, _, values, scales = taken
    body = cpu.encode_sparse(indices, values, kind=kind, scales=scales).buffer
    stated = reference.encode_sparse(indices, values, kind=kind, scales=scales).buffer
    np.testing.assert_array_equal(body, stated)
    assert not body[:HEADROOM].any() and body[-1] == 0


@native_only
@examples(200)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 3000),
    kind=st.sampled_from(["sign", "power"]),
    data=st.data(),
)
def test_native_codes_of_scaled_values_equal_the_reference(seed, size, kind, data):
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(
        rng.random(size) < data.draw(st.sampled_from([0.001, 0.1, 1.0]))
    ).astype(np.uint32)
    scale = 0.3 if kind == "sign" else 2.0 ** data.draw(st.integers(-119, 127))
    down = 0 if kind == "sign" else rng.integers(0, 8, len(indices))
    values = (
        np.float32(scale)
        * np.float32(0.5) ** np.float32(down)
        * rng.choice([-1, 1], len(indices)).astype(np.float32)
    )
    body, stated = (
        module.encode_sparse(indices, values.astype(np.float32), kind=kind, scales=(scale,)).buffer
        for module in (cpu, reference)
    )
    assert len(body) == len(stated)
    for module, its_buffer in ((cpu, stated), (reference, body), (cpu, body)):
        its_indices, its_values = module.decode_sparse(its_buffer[HEADROOM:-1], numel=size)
        np.testing.assert_array_equal(its_indices, indices)
        np.testing.assert_array_equal(its_values, values)


@pytest.mark.parametrize(
    "kind, masked",
    [
        ("fp32", 500),
        ("fp16", 0),
        ("bf16", 300),
        ("sign", 500),
        ("power", 500),
        ("2bit", 0),
    ],
)
@pytest.mark.parametrize("chunk", [0, 70])
@pytest.mark.parametrize("bad", [None, np.nan])
def test_encode_topk_is_its_three_parts(kind, masked, chunk, bad):
    grad, u, v = RNG.standard_normal((3, 500)).astype(np.float32)
    if bad is not None:
        grad[7] = bad
    options = dict(momentum=0.9, nesterov=True, scale=0.5)
    choice = dict(k=50, samples=256, offset=3, chunk=chunk)
    in_parts, at_once = [grad.copy(), u.copy(), v.copy()], [grad.copy(), u.copy(), v.copy()]
    finite = cpu.add_to_residual(*in_parts, **options)
    indices = selection.largest_of(in_parts[2], 50, chunk or 500)
    assert len(indices) == (7 * 50 + 10 if chunk else 50)
    indices = indices if finite else indices[:0]
    indices, rows, values, scales = cpu.take_entries(
        indices, in_parts[2], in_parts[1], kind=kind, masked=masked
    )
    encoded = cpu.encode_topk(*at_once, kind=kind, masked=masked, **options, **choice)
    np.testing.assert_array_equal(at_once, in_parts)
    np.testing.assert_array_equal(encoded.undo[0], indices)
    np.testing.assert_array_equal(encoded.undo[1], rows)
    np.testing.assert_array_equal(
        encoded.buffer, cpu.encode_sparse(indices, values, kind=kind, scales=scales).buffer
    )
    assert (encoded.elements, encoded.finite) == (len(indices), finite) and finite == (bad is None)
    assert (len(indices) > 0) == finite


def test_kernels_refuse_what_they_cannot_work_on():
    v = np.zeros(10, np.float32)
    good = dict(
        grad=v.copy(),
        u=None,
        v=v,
        momentum=0.0,
        nesterov=False,
        scale=1.0,
    )
    choice = dict(k=1, samples=16, offset=0)
    if kernels.backend == "native":
        for wrong in (
            {"grad": np.zeros(9, np.float32)},
            {"grad": np.zeros(10, np.float64)},
            {"grad": np.zeros((2, 5), np.float32)},
            {"grad": np.zeros(20, np.float32)[::2]},
            {"u": np.zeros(11, np.float32)},
            {"base": np.zeros(11, np.float32)},
        ):
            with pytest.raises((ValueError, TypeError)):
                cpu.add_to_residual(**{**good, **wrong})
            with pytest.raises((ValueError, TypeError)):
                cpu.encode_topk(**{**good, **wrong}, **choice, kind="fp32")
        for wrong in ({"k": 11}, {"k": 3, "chunk": 2}):
            with pytest.raises((ValueError, TypeError)):
                cpu.encode_topk(**good, **{**choice, **wrong}, kind="fp32")
        with pytest.raises(ValueError, match="power or 2bit, not fp8"):
            cpu.encode_topk(**good, **choice, kind="fp8")
        with pytest.raises(ValueError, match="2bit have 4 scales"):
            cpu.encode_sparse(np.zeros(0, np.uint32), v[:0], kind="2bit", scales=(1.0,))
        with pytest.raises(ValueError, match="outside"):
            cpu.take_entries(np.array([10], np.uint32), v, None, kind="fp32", masked=0)
        with pytest.raises(ValueError, match="outside"):
            cpu.scatter_add(v, np.array([10], np.uint32), np.ones(1, np.float32), scale=1.0)
        for indices in ([3, 3], [4, 3]):
            with pytest.raises(ValueError, match="ascend"):
                cpu.encode_sparse(np.array(indices, np.uint32), np.ones(2, np.float32), kind="fp32")
        with pytest.raises(ValueError, match="fp32, fp16, bf16, sign, power or 2bit, not fp8"):
            cpu.encode_sparse(np.array([3], np.uint32), np.ones(1, np.float32), kind="fp8")
        with pytest.raises(ValueError, match="same length"):
            cpu.encode_sparse(np.array([3], np.uint32), np.ones(2, np.float32), kind="fp32")
