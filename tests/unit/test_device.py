"""The kernels on a device against the CPU's, bit for bit: on a GPU where there is one, which `-k
cuda` chooses, else in Triton's interpreter."""

import kernel_arguments
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_arguments import VALUES, Arguments, assert_same, native_only
from one_tensor import One, cpu
from test_kernels_sums import assert_orthonormal, assert_products_agree, of_few_vectors
from test_selection import DISTRIBUTIONS
from tiers import examples

from horovod_compress import kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from horovod_compress.kernels.device import DeviceArray  # noqa: E402

GPU = torch.cuda.is_available()
# On a GPU the programs run there, else in the interpreter.
on_device = pytest.mark.parametrize(
    "where", ["cuda"] if GPU else ["cpu"], ids=["cuda" if GPU else "interpreted"]
)
MOMENTA = st.sampled_from([None, "vanilla", "nesterov"])


def moved(array, where):
    """Its copy on the device."""
    return DeviceArray(torch.from_numpy(array.copy()).to(where))


def assert_alike(on_host, on_device):
    """To the last bit, the signs of zeros too. What a NaN is otherwise, processors choose."""
    on_device = np.asarray(on_device)
    np.testing.assert_array_equal(on_host, on_device)
    np.testing.assert_array_equal(
        np.signbit(on_host)[on_host == 0], np.signbit(on_device)[on_device == 0]
    )


def compare(name, where, on_device, **arguments):
    """Calls a kernel of both sets; those of the arguments that are named are on the device. Returns
    what the CPU's has returned."""
    here = {
        key: value.copy() if isinstance(value, np.ndarray) else value
        for key, value in arguments.items()
    }
    there = {
        key: moved(value, where) if key in on_device and value is not None else value
        for key, value in arguments.items()
    }
    kernels_there = One(there[on_device[0]].kernels)
    with np.errstate(all="ignore"):
        expected = getattr(cpu, name)(**here)
        got = getattr(kernels_there, name)(**there)
    assert_same(np.asarray(got) if isinstance(got, DeviceArray) else got, expected)
    for key in on_device:
        if here[key] is not None:
            assert_alike(here[key], there[key])
    return expected


def encode_topk(data, a, momentum):
    k = (
        int(a.rng.integers(0, a.size + 1))
        if a.size < 5 or a.one_of(False, True)
        else -(-a.size // 100)
    )
    chunk = a.one_of(0, 0, max(1, a.size), 7, 1000)
    return dict(
        grad=a.any(),
        base=a.one_of(None, a.finite()),
        u=a.finite() if momentum else None,
        v=a.finite(),
        momentum=a.one_of(0.0, 0.9, 1.0),
        nesterov=momentum == "nesterov",
        scale=a.one_of(1.0, 1 / 3),
        k=min(k, chunk or k, a.size),
        samples=a.one_of(0, 256, a.size // 100 + 256),
        offset=data.draw(st.integers(0, 2**32 - 1)),
        chunk=chunk,
        kind=a.one_of(*VALUES),
        masked=a.one_of(0, a.size // 2, a.size),
    )


@native_only
@on_device
@examples(120)
@given(data=st.data(), momentum=MOMENTA)
def test_what_is_sent_and_kept_is_the_same(where, data, momentum):
    compare(
        "encode_topk",
        where,
        ["grad", "base", "u", "v"],
        **encode_topk(data, Arguments(data), momentum),
    )


@native_only
@on_device
@examples(60)
@given(data=st.data(), momentum=MOMENTA)
def test_accumulation_is_the_same(where, data, momentum):
    arguments = encode_topk(data, Arguments(data), momentum)
    for key in ("k", "samples", "offset", "chunk", "kind", "masked"):
        del arguments[key]
    compare("add_to_residual", where, ["grad", "base", "u", "v"], **arguments)


@pytest.mark.extended
@native_only
@on_device
@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_same_is_chosen_of_every_distribution(where, name, ratio):
    """Also where the sample misleads, and more pass than there is room for, or too few."""
    v = DISTRIBUTIONS[name].astype(np.float32)[: 150_001 if ratio < 0.1 else 30_001]
    zero, k = np.zeros_like(v), int(np.ceil(ratio * v.size))
    encoded = compare(
        "encode_topk",
        where,
        ["grad", "u", "v"],
        grad=zero,
        u=None,
        v=v,
        k=k,
        samples=v.size // 200 + 256,
        offset=1234567,
        kind="fp32",
    )
    assert encoded.finite and encoded.elements == min(k, np.count_nonzero(v))


@native_only
@on_device
@pytest.mark.parametrize("misleading", ["none of them is sampled", "they are what is sampled"])
def test_a_sample_that_misleads_changes_nothing(where, misleading):
    """The largest lie together: the floor comes out far too low, or far too high."""
    v = np.random.default_rng(1).standard_normal(100_000).astype(np.float32) / 1000
    if misleading == "they are what is sampled":
        # Whole stretches of 64 among the sampled ones.
        v.reshape(-1, 20)[::16, :4] += 5
        v[: 64 * 8] += 5
    else:
        v[64:40_000] += 5
    compare(
        "encode_topk",
        where,
        ["grad", "u", "v"],
        grad=np.zeros_like(v),
        u=None,
        v=v,
        k=900,
        samples=300,
        offset=0,
        kind="fp32",
    )


@on_device
@pytest.mark.parametrize(
    "name, arrays",
    [
        ("encode_variance", ["grad", "r", "v"]),
        ("encode_variance", ["grad", "squares", "r", "v"]),
        ("encode_adacomp", ["grad", "residual"]),
        ("take_entries", ["v", "u"]),
        ("decode_add_sparse", ["out"]),
        ("apply_momentum", ["out", "u", "new_u"]),
        ("decode_float16", ["half", "out"]),
        ("decode_add_bf16", ["out"]),
    ],
)
@examples(60)
@given(data=st.data())
def test_the_other_kernels_are_the_same(where, name, arrays, data):
    compare(name, where, arrays, **getattr(kernel_arguments, name)(Arguments(data)))


@on_device
@examples(60)
@given(data=st.data())
def test_bfloat16_is_the_same(where, data):
    """But for a body that is not used."""
    grad = Arguments(data).any()
    there = moved(grad, where)
    got, expected = One(there.kernels).encode_bf16(there), cpu.encode_bf16(grad)
    assert (got.elements, got.finite) == (expected.elements, expected.finite) and not there.any()
    if expected.finite:
        assert_same(got, expected)


@native_only
@on_device
@examples(50)
@given(data=st.data(), scales=st.integers(1, 3), size=st.sampled_from([1, 2, 3, 1000]))
def test_codes_are_the_same(where, data, scales, size):
    a = Arguments(data)
    w, steps = a.w(), a.steps(scales)
    shared = dict(w=w, steps=steps, width=(2 * size * int(steps[0])).bit_length(), size=size)
    x = np.clip(a.finite(), -w, w)
    fits = None
    if scales > 1:
        peaks = np.empty(-(-x.size // 64), np.uint32)
        cpu.norms(x, peaks, l2=False)
        fits = compare("encode_scales", where, ["x"], x=x, peaks=peaks, w=w, steps=steps, size=size)
    levels = a.levels(scales, size, fits)
    compare(
        "quantize",
        where,
        ["x"],
        x=x,
        levels=levels,
        **shared,
        clip=np.finfo(np.float32).max,
        key=data.draw(st.integers(0, 2**64 - 1)),
    )
    sums = a.words(a.size, shared["width"], 0)
    compare(
        "dequantize",
        where,
        ["out"],
        words=sums,
        levels=levels,
        out=a.finite(),
        **shared,
        scale=a.scale(),
    )


@on_device
@pytest.mark.parametrize("steps", [[15.0], [3.0, 63.0]])
def test_codes_of_what_is_not_finite_are_zero_and_results_are_not_finite(where, steps):
    """The ranks' shared w says so."""
    numbers, infinite = np.float32([1, np.nan, np.inf, -2] * 40), np.float32([np.inf])
    there = moved(numbers, where), moved(infinite, where)
    for x, w in ((numbers, infinite), there):
        its, shared = One(kernels.of(x)), dict(w=w, steps=steps, width=6, size=1)
        levels, peaks = None, np.empty(3, np.uint32)
        assert np.isinf(np.asarray(its.norms(x, peaks, l2=False))).all()
        if len(steps) > 1:
            levels = its.encode_scales(x, peaks, w=w, steps=steps, size=1)
        words = its.quantize(x, levels, clip=1.0, key=1, **shared)
        assert not np.asarray(words).any()
        assert not its.dequantize(words, levels, x, scale=1.0, **shared)
        assert np.isnan(np.asarray(x)).all()


@on_device
def test_what_has_no_power_of_two_stays_alike(where):
    v, at = np.float32([1, 1e-6, 0.7, 1e-5, 0.3]), np.arange(5, dtype=np.uint32)
    taken, *_ = compare(
        "take_entries", where, ["v", "u"], indices=at, v=v, u=v, kind="power", masked=5
    )
    assert taken.tolist() == [0, 2, 4]


@on_device
@examples(60)
@given(data=st.data())
def test_norms_are_the_same(where, data):
    a = Arguments(data)
    x = a.any()
    there = One(moved(x, where).kernels)
    assert there.max_abs(moved(x, where)) == cpu.max_abs(x)
    assert_same(np.asarray(there.norms(moved(x, where), l2=False)), cpu.norms(x, l2=False))
    exact = a.exact()
    assert there.squared_norm(moved(exact, where)) == pytest.approx(
        cpu.squared_norm(exact), rel=1e-12
    )
    assert np.asarray(there.norms(moved(exact, where), l2=True)) == pytest.approx(
        cpu.norms(exact, l2=True), rel=1e-7
    )


@on_device
@pytest.mark.parametrize(
    "n, m, rank, broken", [(5, 300, 2, None), (260, 40, 4, None), (130, 9, 9, np.inf)]
)
def test_products_with_few_vectors_are_the_same_to_rounding(where, n, m, rank, broken):
    arguments = of_few_vectors(np.random.default_rng(n), n, m, rank, broken)
    there = One(moved(arguments["q"], where).kernels)
    assert_products_agree(there, arguments, rank, of=lambda array: moved(array, where))


@on_device
def test_sums_may_have_the_memory_of_their_mean(where):
    """As those of a single tensor's q, which are summed in place."""
    arguments = of_few_vectors(np.random.default_rng(0), 300, 5, 2)
    p, q, out = (moved(arguments[key], where) for key in ("p", "q", "grad"))
    assert One(p.kernels).product(p, q, q, out, rank=2, scale=0.5, size=3)
    cpu.product(*(arguments[key] for key in ("p", "q", "q", "grad")), rank=2, scale=0.5, size=3)
    np.testing.assert_allclose(np.asarray(out), arguments["grad"], rtol=1e-6)


@on_device
def test_vectors_become_orthonormal(where):
    there = One(moved(np.zeros(1, np.float32), where).kernels)
    assert_orthonormal(there, of=lambda array: moved(array, where))


@on_device
def test_what_does_not_fit_is_refused(where):
    short, long = moved(np.zeros(3, np.float32), where), moved(np.zeros(4, np.float32), where)
    with pytest.raises(ValueError, match="grad, v must have the same length"):
        One(short.kernels).add_to_residual(short, None, long)
    with pytest.raises(ValueError, match="out, u, new_u must have the same length"):
        One(short.kernels).apply_momentum(short, short, long, momentum=0.9, nesterov=False)
    with pytest.raises(ValueError, match="the matrix, of 4 elements, p and q, of 3 and 3"):
        One(short.kernels).project_back(long, short, short, rank=3)
    with pytest.raises(ValueError, match="cut off"):
        One(short.kernels).decode_add_sparse(short, np.zeros(3, np.uint8), scale=1.0)


@on_device
def test_numpy_computes_with_arrays_on_a_device(where):
    host_array = np.arange(6, dtype=np.float32)
    array = moved(host_array, where)
    array *= np.float32(2)
    array += host_array
    np.testing.assert_array_equal(3 * host_array, np.asarray(array))
    host_array += array
    np.testing.assert_array_equal(host_array, 4 * np.arange(6))
    copy = np.empty_like(array)
    np.copyto(copy, array)
    array[np.array([0, 5], np.uint32)] = np.float32([7, 8])
    array[1] = np.nan
    np.testing.assert_array_equal(np.asarray(array), np.float32([7, np.nan, 6, 9, 12, 8]))
    np.testing.assert_array_equal(np.asarray(copy), 3 * np.arange(6))
    np.testing.assert_array_equal(
        np.divide(copy, np.float32(3), out=np.empty(6, np.float32)), np.arange(6)
    )
    np.multiply(np.arange(6, dtype=np.float32), np.float32(0.5), out=copy)
    np.testing.assert_array_equal(np.asarray(copy + np.float32(1) * copy), np.arange(6))
    assert (
        copy.beside(copy) is copy
        and copy.any()
        and len(copy) == copy.size == 6
        and copy.nbytes == 24
    )
    copy.fill(0)
    assert not copy.any() and kernels.beside(copy, host_array).tolist() == [0] * 6
    with pytest.raises(TypeError):
        np.sort(copy)
