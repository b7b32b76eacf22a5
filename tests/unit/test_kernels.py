"""Every native kernel against the reference: bit for bit where the formulas leave no choice, and what both refuse."""
import contextlib
import copy
import inspect
import platform
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_compress import kernels
from horovod_compress.kernels import HEADROOM, Encoded, host, reference

native_only = pytest.mark.skipif(kernels.backend != "native", reason="compares native kernels, which were not built")

# Native kernels are there for several sets of instructions; what runs by itself is the last.
INSTRUCTIONS = kernels.native.available_instructions() if kernels.backend == "native" else []


@contextlib.contextmanager
def using(instructions):
    kernels.native.use_instructions(instructions)
    try:
        yield
    finally:
        kernels.native.use_instructions(INSTRUCTIONS[-1])


# Around vector lengths, blocks of 64 words, and some whole tensors.
sizes = st.one_of(st.integers(0, 70), st.sampled_from([255, 1000, 1023, 1024, 1025, 4097, 30_000]))
KEYS = st.integers(0, 2**64 - 1)
SPECIAL = np.float32([0, -0.0, 1, -1, 1e-45, -1e-39, 2**-126, 65504, 65520, 1e30, 3.4028235e38, -3.4028235e38])


class Arguments:
    """Draws what kernels take."""

    def __init__(self, data):
        self.draw = data.draw
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        self.size = data.draw(sizes)
        self.unit = 2.0 ** self.one_of(-130, -10, 0, 100)

    def one_of(self, *choices):
        return self.draw(st.sampled_from(choices))

    def bits(self, dtype, size=None):
        info = np.iinfo(dtype)
        return self.rng.integers(info.min, info.max, self.size if size is None else size, dtype, endpoint=True)

    def finite(self, size=None):
        size = self.size if size is None else size
        style = self.one_of("normal", "12 orders", "sparse", "ties", "special", "bits")
        x = self.rng.standard_normal(size)
        if style == "12 orders":
            x = x * 10.0 ** self.rng.uniform(-6, 6, size)
        elif style == "sparse":
            x = x * (self.rng.random(size) < 0.05)
        elif style == "ties":
            x = self.rng.integers(-3, 4, size) / 2
        elif style == "special":
            x = self.rng.choice(SPECIAL, size)
        elif style == "bits":
            x = np.nan_to_num(self.bits(np.uint32, size).view(np.float32))
        return x.astype(np.float32)

    def any(self):
        """Among them what is not finite, sometimes."""
        x = self.finite()
        if self.size and self.one_of(False, False, True):
            x[self.rng.integers(0, self.size, 3)] = self.rng.choice([np.nan, np.inf, -np.inf], 3)
        return x

    def exact(self):
        """Values whose sums, in whatever order, are exact."""
        return (self.rng.integers(-1000, 1001, self.size) * self.unit).astype(np.float32)

    def indices(self):
        return np.flatnonzero(self.rng.random(self.size) < self.one_of(0.0, 0.01, 0.3, 1.0)).astype(np.uint32)

    def scale(self):
        return self.one_of(1.0, 0.5, 1 / 3, -1.0)

    def words(self, count, width, spare, more=0):
        """Any words at all, as many as `count` fields need."""
        fields, words, dtype = reference.quantization._shape(count, width, spare)
        return self.bits(np.dtype(dtype.str.replace("u", "i")), words + more)

    def sparse_body(self):
        at = self.indices()
        kind = self.one_of("fp32", "fp16", "bf16", "sign", "power")
        scale = 2.0 ** int(self.rng.integers(-100, 100)) if kind == "power" else 0.3
        values = self.finite(len(at))
        if kind == "power":
            values = np.copysign(np.float32(scale) * np.float32(0.5) ** self.rng.integers(0, 8, len(at)), values)
        return body_of(reference.encode_sparse(at, values.astype(np.float32), kind=kind, scale=scale))

    def steps(self, scales):
        return [2.0**bits - 1 for bits in sorted(self.rng.choice(np.arange(1, 17), scales, replace=False).tolist())]

    def w(self):
        return float(np.float32(self.one_of(0.0, 1e-42, 1e-20, 0.37, 1.0, 1e20, 3.4e38)))

    def levels(self, scales, size, own=None):
        """Words of counts of up to `size`, often as many, if this rank's `own` say so too; None for a single scale."""
        width, counts = size.bit_length(), []
        for its in np.split(own, scales - 1) if own is not None else [None] * (scales - 1):
            fits = 1 if its is None else reference.quantization.unpack(its, self.size, width, 1, 0)
            others = np.where(self.rng.random(self.size) < 0.5, size - 1, self.rng.integers(0, size, self.size))
            counts.append(reference.quantization.pack(others + fits, width, 1))
        return np.concatenate(counts) if counts else None


def body_of(encoded):
    return encoded.buffer[HEADROOM:-1]


# The arguments of each kernel, by name.


def take_entries(a):
    kind, mask = a.one_of("fp32", "fp16", "bf16"), a.one_of(False, True)
    return dict(indices=a.indices(), v=a.finite(), u=a.one_of(None, a.finite()), kind=kind, mask=mask)


def scatter_add(a):
    indices = a.indices()
    return dict(out=a.finite(), indices=indices, values=a.any()[: len(indices)], scale=a.scale())


def decode_add_sparse(a):
    return dict(out=a.finite(), body=a.sparse_body(), scale=a.scale())


def decode_sparse(a):
    return dict(body=a.sparse_body(), numel=a.size)


def encode_strom(a):
    return dict(grad=a.any(), residual=a.finite(), tau=a.one_of(1e-3, 0.5, 1e10))


def encode_variance(a):
    squares = a.one_of(None, np.abs(a.any()))
    return dict(grad=a.any(), squares=squares, r=a.finite(), v=np.abs(a.finite()), alpha=a.one_of(0.1, 1.0, 1.5, 2.0),
                zeta=a.one_of(0.0, 0.999, 1.0), tau=a.one_of(0.0, 0.0, 1e-3, 0.5), error_feedback=a.one_of(False, True))


def encode_adacomp(a):
    return dict(grad=a.exact(), residual=a.exact(), sent=a.indices(), sent_scale=a.one_of(0.0, 3 * a.unit),
                bin_length=a.one_of(1, 2, 15, 16, 17, 50, 500, 10**6), scale_factor=a.one_of(1.0, 2.0, 3.5))


def encode_float16(a):
    return dict(x=a.any(), half=a.bits(np.uint16))


def decode_float16(a):
    return dict(half=a.bits(np.uint16), out=a.finite())


def encode_bf16(a):
    return dict(grad=a.any())


def decode_add_bf16(a):
    return dict(out=a.finite(), body=body_of(reference.encode_bf16(a.finite())), scale=a.scale())


def encode_one_bit(a):
    return dict(grad=a.exact(), residual=a.exact(), growth=a.one_of(1.0, 0.0, 0.5, 2.0), symmetric=a.one_of(False, True))


def decode_add_one_bit(a):
    words = -(-a.size // 32)
    body = struct.pack("<2f", *a.finite(2)) + a.bits(np.int32, words).tobytes()
    return dict(out=a.finite(), body=np.frombuffer(body, np.uint8), scale=a.scale())


def encode_natural(a):
    return dict(grad=a.any(), key=a.draw(KEYS))


def decode_add_natural(a):
    return dict(out=a.finite(), body=body_of(reference.encode_natural(a.finite(), key=a.draw(KEYS))), scale=a.scale())


def buckets(a):
    bucket = a.one_of(1, 2, 15) if a.size <= 70 else a.one_of(16, 17, 512, 100_000)
    return dict(steps=a.one_of(1, 3, 15, 255, 32767), bucket=bucket)


def encode_buckets(a):
    return dict(grad=a.any(), **buckets(a), l2=False, limit=a.one_of(0.0, 0.5, 1.0), key=a.draw(KEYS))


def decode_add_buckets(a):
    options = buckets(a)
    l2, limit = a.one_of(False, True), a.one_of(0.0, 1.0)
    encoded = reference.encode_buckets(a.finite(), **options, l2=l2, limit=limit, key=1)
    return dict(out=a.finite(), body=body_of(encoded), **options, scale=a.scale())


def apply_momentum(a):
    momentum, nesterov = a.one_of(0.0, 0.9), a.one_of(False, True)
    return dict(out=a.any(), u=a.finite(), new_u=a.finite(), momentum=momentum, nesterov=nesterov)


def checksum(a):
    return dict(data=a.bits(np.uint8))


def max_abs(a):
    return dict(x=a.any(), peaks=a.one_of(None, a.bits(np.uint32, -(-a.size // 64))))


def squared_norm(a):
    return dict(x=a.exact())


def random_bits(a):
    return dict(key=a.draw(KEYS), n=a.size)


def draw_coordinates(a):
    first = int(a.rng.integers(0, a.size + 1))
    return dict(key=a.draw(KEYS), numel=a.size, first=first, count=int(a.rng.integers(0, a.size - first + 1)))


def quantize(a):
    scales, size = a.one_of(1, 1, 2, 3, 8), a.one_of(1, 2, 3, 8, 1000)
    steps, x, w, levels = a.steps(scales), a.finite(), a.w(), None
    width = (2 * size * int(steps[0])).bit_length()
    if scales > 1:
        peaks = np.empty(-(-a.size // 64), np.uint32)
        w = min(float(reference.max_abs(x, peaks)) * a.one_of(1, 1.7), float(np.finfo(np.float32).max))
        levels = a.levels(scales, size, reference.encode_scales(x, peaks, w=w, steps=steps, size=size))
    clip = min(a.one_of(0.0, w / 3, w, 2 * w), float(np.finfo(np.float32).max))
    return dict(x=x, levels=levels, w=w, clip=clip, steps=steps, width=width, size=size, key=a.draw(KEYS))


def dequantize(a):
    scales, size = a.one_of(1, 1, 2, 3, 8), a.one_of(1, 2, 3, 8, 1000)
    steps = a.steps(scales)
    width = (2 * size * int(steps[0])).bit_length()
    words, levels = a.words(a.size, width, 0), a.levels(scales, size)
    scaled = dict(w=a.w(), steps=steps, width=width, size=size, scale=a.scale())
    return dict(words=words, levels=levels, out=a.finite(), **scaled)


def encode_scales(a):
    x, peaks = a.finite(), np.empty(-(-a.size // 64), np.uint32)
    reference.max_abs(x, peaks)
    return dict(x=x, peaks=peaks, w=a.w(), steps=a.steps(a.one_of(2, 3, 8)), size=a.one_of(1, 2, 3, 8, 1000))


def encode_signs(a):
    return dict(x=a.finite(), width=a.one_of(2, 3, 5, 11))


def decode_signs(a):
    size = a.one_of(1, 2, 3, 8, 1000)
    width = (2 * size).bit_length()
    return dict(words=a.words(a.size, width, 0, more=1), out=a.finite(), width=width, size=size, unit=a.scale())


ELSEWHERE = {  # have a choice, of what they send or how they round, or compute nothing
    "add_to_residual", "add_sample_squares", "encode_sparse", "flush_denormals", "orthonormalize", "product", "project",
    "project_back", "max_abs_and_deviation", "subtract_product",
}
KERNELS = [name for name in reference.__all__ if name not in ELSEWHERE]


def trimmed(encoded):
    """Without the memory that the buffer is a view of."""
    return encoded._replace(undo=())


# Of these a body says nothing where the gradient was not finite.
BODIES = ("encode_bf16", "encode_buckets", "encode_natural")


def assert_same(mine, its):
    assert isinstance(mine, Encoded) == isinstance(its, Encoded)
    if isinstance(its, tuple):
        assert len(mine) == len(its)
        for pair in zip(mine, its):
            assert_same(*pair)
    elif isinstance(its, np.ndarray):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)
    else:
        assert mine == its


@native_only
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_native_equals_the_reference(name, data):
    arguments = globals()[name](Arguments(data))
    mine, its = copy.deepcopy(arguments), copy.deepcopy(arguments)
    with np.errstate(all="ignore"), using(data.draw(st.sampled_from(INSTRUCTIONS))):
        got, expected = getattr(host, name)(**mine), getattr(reference, name)(**its)
    if name in BODIES and expected.finite is False:  # not finite: what the body says does not count
        got, expected = got.finite, expected.finite
    elif name == "encode_buckets":
        got, expected = trimmed(got), trimmed(expected)
    assert_same(got, expected)
    for argument, value in its.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(mine[argument], value, err_msg=argument)


@native_only
@pytest.mark.parametrize("name", ["dequantize", "decode_float16", "decode_signs"])
@settings(max_examples=15, deadline=None)
@given(data=st.data(), more=st.sampled_from([0, 1, 63, 64, 1000]), offset=st.integers(0, 17))
def test_large_outputs_begin_and_end_anywhere(name, data, more, offset):
    """They are written past the caches, whole vectors at a time."""
    a = Arguments(data)
    a.size = 2**18 + more
    arguments = globals()[name](a)
    memory = np.full(a.size + 32, 7, np.float32)
    out = memory[offset:][: a.size]
    with np.errstate(all="ignore"), using(data.draw(st.sampled_from(INSTRUCTIONS))):
        got, expected = (getattr(k, name)(**{**arguments, "out": to}) for k, to in ((host, out), (reference, arguments["out"])))
    assert_same(got, expected)
    np.testing.assert_array_equal(out, arguments["out"])
    assert (np.delete(memory, np.s_[offset : offset + a.size]) == 7).all()


@pytest.mark.parametrize("share", [0.5, 0.03, 0.99])
def test_elements_that_share_a_draw_round_independently(share):
    """Of a word's ten codes, and of eight elements of a block of natural's, any two are uncorrelated, and each mean is right."""
    words, size = 64 * 3000, 8 * 64 * 3000
    codes = host.quantize(np.full(10 * words, share, np.float32), None, w=1.0, clip=1.0, steps=[1.0], width=3, size=1, key=12345)
    codes = reference.quantization.unpack(codes, 10 * words, 3, 0, 1)
    powers = np.zeros(size, np.float32)
    reference.decode_add_natural(powers, body_of(host.encode_natural(np.full(size, 1 + share, np.float32), key=12345)), scale=1.0)
    for drawn in codes.reshape(-1, 10, 64), powers.reshape(-1, 8, 64) - 1:
        drawn = drawn.swapaxes(0, 1).reshape(drawn.shape[1], -1)
        sigma = 1 / np.sqrt(drawn.shape[1])
        assert np.abs(drawn.mean(axis=1) - share).max() < 4.5 * sigma * np.sqrt(share * (1 - share))
        assert np.abs(np.corrcoef(drawn) - np.eye(len(drawn))).max() < 4.5 * sigma


# Sums of many elements depend on their order, which is one for all instructions: ranks with different CPUs get the same bits.


def any_add_to_residual(a):
    k = int(a.rng.integers(0, a.size + 1))
    return dict(grad=a.any(), u=a.one_of(None, a.finite()), v=a.finite(), momentum=0.9, nesterov=a.one_of(False, True), scale=0.7, k=k,
                samples=a.one_of(0, 300), offset=a.one_of(0, 5))


def any_encode_adacomp(a):
    return dict(grad=a.any(), residual=a.finite(), sent=a.indices(), sent_scale=0.3, bin_length=a.one_of(7, 50, 500), scale_factor=2.0)


def matrix(a, *names):
    n, m, rank = a.draw(st.integers(1, 40)), a.draw(st.integers(1, 70)), a.draw(st.integers(1, 9))
    lengths = {"p": rank * n, "q": rank * m, "pending": rank * m}
    return {name: a.rng.standard_normal(lengths.get(name, n * m)).astype(np.float32) for name in names} | {"rank": rank}


SUMS = {
    "add_to_residual": any_add_to_residual,
    "encode_adacomp": any_encode_adacomp,
    "encode_buckets": lambda a: dict(grad=a.finite(), **buckets(a), l2=True, limit=a.one_of(0.0, 1.0), key=7),
    "encode_one_bit": lambda a: dict(grad=a.any(), residual=a.finite(), growth=a.one_of(1.0, 0.7), symmetric=a.one_of(False, True)),
    "orthonormalize": lambda a: matrix(a, "p"),
    "product": lambda a: matrix(a, "p", "q", "out") | {"scale": -0.3},
    "project": lambda a: {"pending": None} | matrix(a, "grad", "residual", "q", "p", *a.one_of([], ["pending"])),
    "project_back": lambda a: matrix(a, "residual", "p", "q"),
    "max_abs_and_deviation": lambda a: dict(x=a.finite()),
    "squared_norm": lambda a: dict(x=a.finite()),
    "subtract_product": lambda a: matrix(a, "residual", "p", "q"),
}


@native_only
@pytest.mark.parametrize("name", SUMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_all_instructions_give_the_same_bits(name, data):
    arguments, found = SUMS[name](Arguments(data)), []
    for instructions in INSTRUCTIONS:
        mine = copy.deepcopy(arguments)
        with using(instructions):
            result = getattr(host, name)(**mine)
        found.append((trimmed(result) if name == "encode_buckets" else result, *(a for a in mine.values() if isinstance(a, np.ndarray))))
    for other in found[1:]:
        assert_same(other, found[0])


@native_only
@pytest.mark.parametrize("name", reference.__all__)
def test_both_sets_have_the_same_arguments(name):
    """By the signature that pybind11 writes into the documentation; numbers are keywords in both."""
    expected = []
    for argument in inspect.signature(getattr(reference, name)).parameters.values():
        if argument.kind == argument.KEYWORD_ONLY and "*" not in expected:
            expected.append("*")
        expected.append(argument.name)
    stated = getattr(kernels.native, name).__doc__.splitlines()[0]
    assert re.findall(r"[(,] ?(\*|\w+)(?=: |,)", stated) == expected


def test_kernels_of_an_array():
    assert kernels.of(np.zeros(1, np.float32)) is host is getattr(kernels, kernels.backend)
    for wrong, name in (([1.0], "builtins.list"), (None, "builtins.NoneType"), (np.float32(1), "numpy.float32")):
        with pytest.raises(TypeError, match=f"no kernels for {name}"):
            kernels.of(wrong)


@native_only
def test_instructions_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="no kernels for the instructions 'avx1024'"):
        kernels.native.use_instructions("avx1024")


# The reference adds up in another order: where sums are not exact, results agree to float32 rounding.


@native_only
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_squared_norm_and_deviation_agree_to_rounding(data):
    x = Arguments(data).any()
    (peak, deviation), (expected_peak, expected_deviation) = host.max_abs_and_deviation(x), reference.max_abs_and_deviation(x)
    assert peak == expected_peak
    if np.isfinite(peak) and x.size:
        assert abs(deviation**2 - expected_deviation**2) <= 1e-6 * np.mean(x.astype(np.float64) ** 2)
    x = np.nan_to_num(x)
    assert host.squared_norm(x) == pytest.approx(reference.squared_norm(x), rel=1e-12)


@native_only
@pytest.mark.parametrize("symmetric", [False, True])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_one_bit_agrees_to_rounding(symmetric, data):
    a = Arguments(data)
    grad, residual = np.clip(a.any(), -1e36, 1e36), np.clip(a.finite(), -1e36, 1e36)
    mine, its = residual.copy(), residual.copy()
    growth = a.one_of(1.0, 0.0, 0.1, 3.0)
    got, expected = (k.encode_one_bit(grad.copy(), r, growth=growth, symmetric=symmetric) for k, r in ((host, mine), (reference, its)))
    assert got[1:] == expected[1:]
    units, expected_units = (encoded.buffer[HEADROOM:][:8].view(np.float32) for encoded in (got, expected))
    np.testing.assert_allclose(units, expected_units, rtol=2e-6, atol=2e-6 * np.abs(expected_units).max())
    np.testing.assert_array_equal(got.buffer[HEADROOM + 8 :], expected.buffer[HEADROOM + 8 :])
    np.testing.assert_allclose(mine, its, rtol=2e-6, atol=2e-6 * np.abs(expected_units).max())


def test_the_mean_of_one_half_does_not_suffer_from_the_other():
    grad = np.full(1000, 1e-3, np.float32)
    grad[::50] = -1e6
    buffer = host.encode_one_bit(grad, np.zeros(1000, np.float32), growth=1.0, symmetric=False).buffer
    np.testing.assert_allclose(buffer[HEADROOM:][:8].view(np.float32), [1e-3, -1e6], rtol=1e-5)


@native_only
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_adacomp_agrees_to_rounding(data):
    a = Arguments(data)
    grad, residual = a.any(), a.finite()
    options = dict(bin_length=a.one_of(1, 7, 50, 500), scale_factor=2.0)
    sent, options["sent_scale"] = a.indices(), abs(float(a.finite(1)[0]))
    mine, its = residual.copy(), residual.copy()
    got, expected = (
        module.encode_adacomp(grad.copy(), array, sent, **options) for module, array in ((host, mine), (reference, its))
    )
    assert got.finite == expected.finite
    assert got.undo[1] == pytest.approx(expected.undo[1], rel=1e-6)
    np.testing.assert_array_equal(got.undo[0], expected.undo[0])
    (indices, values), (expected_indices, expected_values) = (
        reference.decode_sparse(body_of(result), numel=a.size) for result in (got, expected)
    )
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(values, expected_values, rtol=1e-6)
    np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-6 * np.abs(expected_values).max(initial=0))


@native_only
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_products_with_few_vectors_agree_to_rounding(data):
    a = Arguments(data)
    n, m, rank = a.draw(st.integers(1, 40)), a.draw(st.integers(1, 70)), a.draw(st.integers(1, 9))
    grad, residual = (a.rng.standard_normal(n * m).astype(np.float32) for _ in range(2))
    broken = a.one_of(None, None, np.nan, np.inf, 2.0**111)
    if broken:
        grad[a.rng.integers(grad.size)] = broken
    q = a.rng.standard_normal(rank * m).astype(np.float32)
    found = []
    for module in (host, reference):
        x, p, back, out = residual.copy(), np.empty(rank * n, np.float32), np.empty(rank * m, np.float32), np.empty(n * m, np.float32)
        finite = module.project(grad, x, q, p, None, rank=rank)
        module.project_back(x, p, back, rank=rank)
        module.product(p, back, out, rank=rank, scale=-0.5)
        later, then = x.copy(), p.copy()
        module.subtract_product(x, p, back, rank=rank)
        again = module.project(grad, x, q, p, None, rank=rank), module.project(grad, later, q, then, back, rank=rank)
        assert again == (finite, finite)
        np.testing.assert_array_equal(later, x)
        np.testing.assert_array_equal(then, p)
        found.append((finite, x, p, back, out))
    assert found[0][0] == found[1][0] == (not broken)
    # Of sums, whose terms may cancel out, the terms' sizes.
    first, vectors = np.abs(residual if broken else residual + grad).reshape(n, m), np.abs(q).reshape(rank, m).T
    its_p = first @ vectors
    its_back = first.T @ its_p
    sizes = its_p @ its_back.T, np.abs(found[1][1]).reshape(n, m) @ vectors, its_back, its_p @ its_back.T
    for mine, its, size in zip(found[0][1:], found[1][1:], sizes):
        np.testing.assert_allclose(mine, its, atol=max(2e-5 * np.abs(its).max(), 3e-7 * size.max()))


@pytest.mark.parametrize("module", [host, reference])
def test_orthonormalize(module):
    """Orthonormal vectors of the same space; zeros for what lies in the space of those before it."""
    rng = np.random.default_rng(0)
    for unit in (1e-30, 1, 1e30):
        vectors = rng.standard_normal((5, 40)).astype(np.float32)
        vectors[1] = vectors[0] * (1 + 1e-3 * rng.standard_normal(40))  # nearly parallel
        vectors[3] = 2 * vectors[0] - vectors[2]
        p = (vectors * np.float32(unit)).reshape(-1)
        module.orthonormalize(p, rank=5)
        p = p.reshape(5, 40).astype(np.float64)
        assert not p[3].any()
        kept = p[[0, 1, 2, 4]]
        np.testing.assert_allclose(kept @ kept.T, np.eye(4), atol=1e-6)
        np.testing.assert_allclose(vectors @ kept.T @ kept, vectors, atol=1e-5)


@native_only
def test_powersgd_needs_the_same_kernels_on_all_ranks():
    """Its `same_kernels`: every rank orthonormalizes, and of nearly parallel vectors what is left shows how sums were rounded."""
    vector = np.random.default_rng(0).standard_normal(100_000)
    mine = np.concatenate([vector, vector + 3e-6 * np.random.default_rng(1).standard_normal(100_000)]).astype(np.float32)
    its = mine.copy()
    host.orthonormalize(mine, rank=2)
    reference.orthonormalize(its, rank=2)
    np.testing.assert_allclose(mine, its, atol=1e-6)
    assert (mine != its).any()


@native_only
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_buckets_of_norm_l2_agree_to_rounding(data):
    """Norms to rounding; levels to one, where the last bit of a norm tips the scales."""
    a = Arguments(data)
    grad, options = a.any(), dict(**buckets(a), l2=True, limit=0.0, key=a.draw(KEYS))
    outs, results = [], []
    for module in (host, reference):
        results.append(module.encode_buckets(grad.copy(), **options))
        outs.append(np.zeros_like(grad))
        reference.decode_add_buckets(outs[-1], body_of(results[-1]), steps=options["steps"], bucket=options["bucket"], scale=1.0)
    assert results[0].finite == results[1].finite
    if results[0].finite:
        count = -(-a.size // options["bucket"])
        norms, expected = (body_of(result)[1 : 1 + 4 * count].copy().view(np.float32) for result in results)
        np.testing.assert_allclose(norms, expected, rtol=1e-6)
        norm = np.repeat(np.maximum(expected, 1e-45), options["bucket"])[: a.size]
        off = np.abs(outs[0].astype(np.float64) - outs[1]) / norm
        assert (off <= 1.001 / options["steps"]).all() and (off > 1e-5).sum() <= 2 + a.size // 1000


# What is refused.


class Fixed:
    """A `data` that always draws what makes many arguments: kernels get one typical call."""

    def draw(self, strategy):
        return {id(sizes): 100, id(KEYS): 12345}.get(id(strategy), 7)


def typical(name):
    a = Arguments(Fixed())
    a.one_of = lambda *choices: choices[-1]
    return globals()[name](a)


ONE_LENGTH_OF_SEVERAL = {
    "take_entries": ["u", "v"], "scatter_add": ["values", "indices"], "encode_strom": ["grad", "residual"],
    "encode_variance": ["grad", "squares", "r", "v"], "encode_adacomp": ["grad", "residual"], "encode_float16": ["x", "half"],
    "decode_float16": ["half", "out"], "decode_add_bf16": ["out", "body"], "encode_one_bit": ["grad", "residual"],
    "decode_add_one_bit": ["body"], "decode_add_natural": ["body"], "decode_add_sparse": ["body"], "decode_sparse": ["body"],
    "decode_add_buckets": ["body"], "apply_momentum": ["out", "u", "new_u"], "quantize": ["levels"], "max_abs": ["peaks"], "encode_scales": ["peaks"],
    "dequantize": ["words", "levels"], "decode_signs": ["words"],
}
WRITTEN = {
    "take_entries": ["v", "u"], "scatter_add": ["out"], "decode_add_sparse": ["out"], "encode_strom": ["grad", "residual"],
    "encode_variance": ["grad", "r", "v"], "encode_adacomp": ["grad", "residual"], "encode_float16": ["half"], "decode_float16": ["out"],
    "encode_bf16": ["grad"], "decode_add_bf16": ["out"], "encode_one_bit": ["grad", "residual"], "decode_add_one_bit": ["out"],
    "encode_natural": ["grad"], "decode_add_natural": ["out"], "encode_buckets": ["grad"], "decode_add_buckets": ["out"],
    "apply_momentum": ["out", "new_u"], "max_abs": ["peaks"], "dequantize": ["out"], "decode_signs": ["out"],
}


def frozen(array):
    array.flags.writeable = False
    return array


@native_only
@pytest.mark.parametrize("name", KERNELS)
def test_arrays_that_do_not_fit_are_refused(name):
    getattr(host, name)(**typical(name))
    for argument, value in typical(name).items():
        if not isinstance(value, np.ndarray):
            continue
        same_width = np.dtype(f"{'i' if value.dtype.kind != 'i' else 'u'}{value.itemsize}")
        wrong = [value.astype(np.float64), value.view(same_width), value.reshape(1, -1), np.repeat(value, 2)[::2]]
        wrong += [value.tolist(), None]
        if argument in ONE_LENGTH_OF_SEVERAL.get(name, []):
            wrong += [np.append(value, value[:1]), value[:-1]]
        if argument in WRITTEN.get(name, []):
            wrong.append(frozen(value.copy()))
        for array in wrong:
            if array is None and argument in ("u", "squares") or (name, argument) == ("max_abs", "peaks") and array is None:
                continue
            with pytest.raises((ValueError, TypeError)):
                getattr(host, name)(**{**typical(name), argument: array})


NINE = [1.0] * 9  # scales


@native_only
@pytest.mark.parametrize("name, wrong", [
    ("take_entries", {"kind": "fp8"}), ("take_entries", {"kind": "sign"}), ("take_entries", {"indices": np.array([100], np.uint32)}),
    ("scatter_add", {"indices": np.array([100], np.uint32), "values": np.ones(1, np.float32)}),
    ("encode_adacomp", {"bin_length": 0}), ("encode_adacomp", {"bin_length": -1}), ("encode_adacomp", {"bin_length": 1.5}),
    ("encode_adacomp", {"sent": np.array([100], np.uint32)}),
    ("encode_buckets", {"bucket": 0}), ("encode_buckets", {"steps": 0}), ("encode_buckets", {"steps": 32768}),
    ("decode_add_buckets", {"bucket": 0}), ("decode_add_buckets", {"steps": 0}), ("decode_add_buckets", {"steps": 32768}),
    ("draw_coordinates", {"count": 101}), ("draw_coordinates", {"first": 90, "count": 11}),
    ("draw_coordinates", {"first": 2**63, "count": 2**63}), ("draw_coordinates", {"numel": 2**32}),
    ("draw_coordinates", {"first": -1}), ("draw_coordinates", {"key": -1}), ("draw_coordinates", {"key": 2**64}),
    ("encode_natural", {"key": 2**64}),
    ("random_bits", {"key": -1}), ("random_bits", {"key": 2**64}), ("random_bits", {"n": -1}),
    ("quantize", {"width": 0}), ("quantize", {"width": 65}), ("quantize", {"width": -1}), ("quantize", {"steps": []}),
    ("quantize", {"steps": NINE}), ("quantize", {"levels": None}), ("quantize", {"size": 0}),
    ("dequantize", {"width": 0}), ("dequantize", {"width": 65}), ("dequantize", {"steps": []}),
    ("dequantize", {"levels": None}), ("dequantize", {"steps": NINE}), ("dequantize", {"size": 0}),
    ("dequantize", {"size": -1}), ("encode_scales", {"size": 0}), ("encode_scales", {"size": 2**63}),
    ("encode_scales", {"steps": []}), ("encode_scales", {"steps": NINE}),
    ("encode_signs", {"width": 0}), ("encode_signs", {"width": 65}), ("decode_signs", {"width": 0}), ("decode_signs", {"width": 65}),
    ("decode_sparse", {"numel": -1}),
])
def test_numbers_out_of_range_are_refused(name, wrong):
    with pytest.raises((ValueError, TypeError)):
        getattr(host, name)(**{**typical(name), **wrong})


@native_only
@pytest.mark.parametrize(
    "name", ["encode_bf16", "encode_one_bit", "encode_natural", "encode_buckets", "quantize", "encode_scales", "encode_signs"]
)
def test_spare_memory_changes_nothing(name):
    """A buffer of an earlier step is used again where it fits, whatever is in it, and left alone where it does not."""
    kernel = getattr(host, name)

    def memory_of(result):
        return result if isinstance(result, np.ndarray) else result.undo[0] if name == "encode_buckets" else result.buffer

    first = kernel(**typical(name))
    buffer = memory_of(first)
    for spare, fits in ((buffer.copy(), True), (buffer[:-1].copy(), False)):
        spare.view(np.uint8)[: None if buffer.dtype != np.uint8 else -1] = 0xA5  # a body's padding is never written
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
    arguments = dict(grad=zeros, squares=None, r=r, v=zeros, alpha=1.0, zeta=0.9, tau=0.0, error_feedback=False)
    expected = host.encode_variance(**copy.deepcopy(arguments))
    count = expected.elements
    assert count > 20
    for entries, fits in ((2 * count, True), (count, True), (count // 3, False)):
        spare = np.full(3 * entries, 0xA5A5A5A5, np.uint32)[:entries]
        got = host.encode_variance(**copy.deepcopy(arguments), spare=spare)
        assert_same(got, expected)
        assert np.shares_memory(got.undo[0], spare) == np.shares_memory(got.undo[1], spare.base) == fits
        again = host.encode_variance(**copy.deepcopy(arguments), spare=got.undo[0])
        assert_same(again, expected)
        assert np.shares_memory(again.undo[0], got.undo[0])
    for spare in (got.undo[0].copy(), frozen(np.zeros(3 * count, np.uint32))[:count], np.zeros(3 * count, np.float32).view(np.uint32)[:count]):
        assert_same(host.encode_variance(**copy.deepcopy(arguments), spare=spare), expected)


def test_small_halves_survive_in_threads_that_flush_denormals():
    """TensorFlow's do. The mode is the thread's, and is given back."""
    halves = np.array([1, 2, 500, 1023], np.uint16)  # below 2^-14
    out = np.empty(4, np.float32)
    flushing = 0x8040 if platform.machine() == "x86_64" else 1 << 24
    before = host.flush_denormals(mode=flushing)
    try:
        assert host.flush_denormals(mode=0) == (flushing if kernels.backend == "native" else 0)
        host.decode_float16(halves, out)
    finally:
        host.flush_denormals(mode=before)
    np.testing.assert_array_equal(out, halves.view(np.float16).astype(np.float32))
