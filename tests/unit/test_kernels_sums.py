"""Native kernels that add up many elements: the same bits with all instructions, and the
reference's to rounding."""

import copy
import inspect
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_arguments import (
    INSTRUCTIONS,
    KEYS,
    VALUES,
    Arguments,
    assert_same,
    body_of,
    buckets,
    native_only,
    trimmed,
    using,
)
from one_tensor import cpu, reference
from tiers import examples

from horovod_compress import kernels
from horovod_compress.kernels import HEADROOM

# Sums of many elements depend on their order, which is one for all instructions: ranks with
# different CPUs get the same bits.


def any_add_to_residual(a):
    return dict(
        grad=a.any(),
        u=a.one_of(None, a.finite()),
        v=a.finite(),
        base=a.one_of(None, a.finite()),
        momentum=0.9,
        nesterov=a.one_of(False, True),
        scale=0.7,
    )


def any_encode_topk(a):
    k = int(a.rng.integers(0, a.size + 1))
    choice = dict(k=k, samples=a.one_of(0, 300), offset=a.one_of(0, 5))
    coding = dict(kind=a.one_of(*VALUES), masked=a.one_of(0, a.size // 2, a.size))
    return any_add_to_residual(a) | choice | coding


def any_encode_adacomp(a):
    return dict(
        grad=a.any(),
        residual=a.finite(),
        sent=a.indices(),
        sent_scale=0.3,
        bin_length=a.one_of(7, 50, 500),
        scale_factor=2.0,
    )


def matrix(a, *names):
    n, m, rank = a.draw(st.integers(1, 40)), a.draw(st.integers(1, 70)), a.draw(st.integers(1, 9))
    lengths = {"p": rank * n, "q": rank * m}
    return {
        name: a.rng.standard_normal(lengths.get(name, n * m)).astype(np.float32) for name in names
    } | {"rank": rank}


SUMS = {
    "add_to_residual": any_add_to_residual,
    "encode_adacomp": any_encode_adacomp,
    "encode_buckets": lambda a: dict(
        grad=a.finite(), **buckets(a), l2=True, limit=a.one_of(0.0, 1.0), key=7
    ),
    "encode_one_bit": lambda a: dict(
        grad=a.any(),
        residual=a.finite(),
        growth=a.one_of(1.0, 0.7),
        symmetric=a.one_of(False, True),
    ),
    "encode_topk": any_encode_topk,
    "orthonormalize": lambda a: (found := matrix(a, "p")) | {"sums": found["p"]},
    "product": lambda a: (
        (found := matrix(a, "p", "q", "out")) | {"sums": found["q"], "scale": -0.3, "size": 3}
    ),
    "project": lambda a: (
        matrix(a, "grad", "residual", "q", "p")
        | {"pending": a.one_of(False, True), "length": a.one_of(1.0, 0.3)}
    ),
    "project_back": lambda a: matrix(a, "residual", "p", "q"),
    "max_abs_and_deviation": lambda a: dict(x=a.finite()),
    "squared_norm": lambda a: dict(x=a.finite()),
    "subtract_product": lambda a: matrix(a, "residual", "p", "q"),
}


@native_only
@pytest.mark.parametrize("name", SUMS)
@examples(40)
@given(data=st.data())
def test_all_instructions_give_the_same_bits(name, data):
    arguments, found = SUMS[name](Arguments(data)), []
    for instructions in INSTRUCTIONS:
        mine = copy.deepcopy(arguments)
        with using(instructions):
            result = getattr(cpu, name)(**mine)
        found.append(
            (
                trimmed(result) if name == "encode_buckets" else result,
                *(a for a in mine.values() if isinstance(a, np.ndarray)),
            )
        )
    for other in found[1:]:
        assert_same(other, found[0])


@native_only
@pytest.mark.parametrize("name", reference.__all__)
def test_both_sets_have_the_same_arguments(name):
    """By the signature that pybind11 writes into the documentation; numbers are keywords in
    both."""
    expected = []
    for argument in inspect.signature(getattr(kernels.reference, name)).parameters.values():
        if argument.kind == argument.KEYWORD_ONLY and "*" not in expected:
            expected.append("*")
        expected.append(argument.name)
    stated = getattr(kernels.native, name).__doc__.splitlines()[0]
    assert re.findall(r"[(,] ?(\*|\w+)(?=: |,)", stated) == expected


def test_kernels_of_an_array():
    assert kernels.of(np.zeros(1, np.float32)) is kernels.cpu is getattr(kernels, kernels.backend)
    for wrong, name in (
        ([1.0], "builtins.list"),
        (None, "builtins.NoneType"),
        (np.float32(1), "numpy.float32"),
    ):
        with pytest.raises(TypeError, match=f"no kernels for {name}"):
            kernels.of(wrong)


@native_only
def test_instructions_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="no kernels for the instructions 'avx1024'"):
        kernels.native.use_instructions("avx1024")


# The reference adds up in another order: where sums are not exact, results agree to float32
# rounding.


@native_only
@examples(120)
@given(data=st.data())
def test_squared_norm_and_deviation_agree_to_rounding(data):
    x = Arguments(data).any()
    (peak, deviation), (expected_peak, expected_deviation) = (
        cpu.max_abs_and_deviation(x),
        reference.max_abs_and_deviation(x),
    )
    assert peak == expected_peak
    if np.isfinite(peak) and x.size:
        assert abs(deviation**2 - expected_deviation**2) <= 1e-6 * np.mean(
            x.astype(np.float64) ** 2
        )
    x = np.nan_to_num(x)
    assert cpu.squared_norm(x) == pytest.approx(reference.squared_norm(x), rel=1e-12)


@native_only
@pytest.mark.parametrize("symmetric", [False, True])
@examples(120)
@given(data=st.data())
def test_one_bit_agrees_to_rounding(symmetric, data):
    a = Arguments(data)
    grad, residual = np.clip(a.any(), -1e36, 1e36), np.clip(a.finite(), -1e36, 1e36)
    mine, its = residual.copy(), residual.copy()
    growth = a.one_of(1.0, 0.0, 0.1, 3.0)
    got, expected = (
        k.encode_one_bit(grad.copy(), r, growth=growth, symmetric=symmetric)
        for k, r in ((cpu, mine), (reference, its))
    )
    assert got[1:] == expected[1:]
    units, expected_units = (
        encoded.buffer[HEADROOM:][:8].view(np.float32) for encoded in (got, expected)
    )
    np.testing.assert_allclose(
        units, expected_units, rtol=2e-6, atol=2e-6 * np.abs(expected_units).max()
    )
    np.testing.assert_array_equal(got.buffer[HEADROOM + 8 :], expected.buffer[HEADROOM + 8 :])
    np.testing.assert_allclose(mine, its, rtol=2e-6, atol=2e-6 * np.abs(expected_units).max())


def test_the_mean_of_one_half_does_not_suffer_from_the_other():
    grad = np.full(1000, 1e-3, np.float32)
    grad[::50] = -1e6
    buffer = cpu.encode_one_bit(
        grad, np.zeros(1000, np.float32), growth=1.0, symmetric=False
    ).buffer
    np.testing.assert_allclose(buffer[HEADROOM:][:8].view(np.float32), [1e-3, -1e6], rtol=1e-5)


@native_only
@examples(120)
@given(data=st.data())
def test_adacomp_agrees_to_rounding(data):
    a = Arguments(data)
    grad, residual = a.any(), a.finite()
    options = dict(bin_length=a.one_of(1, 7, 50, 500), scale_factor=2.0)
    sent, options["sent_scale"] = a.indices(), abs(float(a.finite(1)[0]))
    mine, its = residual.copy(), residual.copy()
    got, expected = (
        module.encode_adacomp(grad.copy(), array, sent, **options)
        for module, array in ((cpu, mine), (reference, its))
    )
    assert got.finite == expected.finite
    assert got.undo[1] == pytest.approx(expected.undo[1], rel=1e-6)
    np.testing.assert_array_equal(got.undo[0], expected.undo[0])
    (indices, values), (expected_indices, expected_values) = (
        reference.decode_sparse(body_of(result), numel=a.size) for result in (got, expected)
    )
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(values, expected_values, rtol=1e-6)
    np.testing.assert_allclose(
        mine, its, rtol=1e-6, atol=1e-6 * np.abs(expected_values).max(initial=0)
    )


def of_few_vectors(rng, n, m, rank, broken=None):
    """What the kernels of products with few vectors are called with."""

    def normal(*shape):
        return rng.standard_normal(np.prod(shape)).astype(np.float32)

    grad = normal(n, m)
    if broken:
        grad[rng.integers(grad.size)] = broken
    return {"grad": grad, "residual": normal(n, m), "q": normal(rank, m), "p": normal(rank, n)}


def products(module, grad, residual, q, p, rank, of=np.copy):
    """A step on what is pending of a last one: [the residual, P, Mᵀ·P, the mean Q and the product
    of those, the residual without it], and whether the product is finite."""
    g, x, q, p, back, mean, out = map(of, (grad, residual, q, p, q, q, grad))
    module.project(g, x, q, p, rank=rank, pending=True, length=1.5)
    kept = of(np.asarray(x))
    module.project_back(x, p, back, rank=rank)
    finite = module.product(p, back, mean, out, rank=rank, scale=-0.5, size=3)
    module.subtract_product(x, p, mean, rank=rank)
    return [np.asarray(each) for each in (kept, p, back, mean, out, x)], finite


def assert_products_agree(module, arguments, rank, of=np.copy):
    """To rounding: of sums, whose terms may cancel out, of the terms' sizes."""
    with np.errstate(all="ignore"):
        expected, finite = products(reference, **arguments, rank=rank)
        found, its = products(module, **arguments, rank=rank, of=of)
    assert its == finite
    if not finite:
        assert np.isnan(found[1]).any() and np.isnan(expected[1]).any()
        del found[1:]
    n, m = (arguments[key].size // rank for key in ("p", "q"))
    kept, p = expected[0].reshape(n, m), expected[1].reshape(rank, n)
    vectors = np.abs(arguments["q"]).reshape(rank, m)
    of_p = vectors @ np.abs(kept).T
    of_back = np.abs(p) @ np.abs(kept)
    of_out = of_back.T @ of_p
    sizes = [kept, of_p, of_back, of_back, of_out, of_out]
    for mine, other, size in zip(found, expected, sizes):
        bound = max(2e-5 * np.abs(other).max(), 3e-7 * np.abs(size).max())
        np.testing.assert_allclose(mine, other, rtol=1e-7, atol=bound)


@native_only
@examples(120)
@given(data=st.data())
def test_products_with_few_vectors_agree_to_rounding(data):
    a = Arguments(data)
    n, m, rank = a.draw(st.integers(1, 40)), a.draw(st.integers(1, 70)), a.draw(st.integers(1, 9))
    broken = a.one_of(None, None, np.nan, np.inf, 2.0**111)
    assert_products_agree(cpu, of_few_vectors(a.rng, n, m, rank, broken), rank)


@native_only
def test_products_with_few_vectors_subtract_what_is_pending():
    """As `subtract_product` alone; and with a length as if the vectors had been divided by it."""
    for module in (cpu, reference):
        a = of_few_vectors(np.random.default_rng(0), 30, 50, 3)
        x, last_p, q = a["residual"].copy(), a["p"].copy(), a["q"] / np.float32(1.5)
        module.project(**a, rank=3, pending=True, length=1.5)
        module.subtract_product(x, last_p, a["q"], rank=3)
        p = np.empty_like(last_p)
        module.project(a["grad"], x, q, p, rank=3, pending=False, length=1.0)
        np.testing.assert_array_equal(x, a["residual"])
        np.testing.assert_array_equal(p, a["p"])


def assert_orthonormal(module, of=np.copy):
    """Orthonormal vectors of the same space; zeros for what lies in the space of those before
    it."""
    rng = np.random.default_rng(0)
    for unit in (1e-30, 1, 1e30):
        vectors = rng.standard_normal((5, 40)).astype(np.float32)
        vectors[1] = vectors[0] * (1 + 1e-3 * rng.standard_normal(40))  # nearly parallel
        vectors[3] = 2 * vectors[0] - vectors[2]
        p = of((vectors * np.float32(unit)).reshape(-1))
        module.orthonormalize(p, p, rank=5)
        p = np.asarray(p).reshape(5, 40).astype(np.float64)
        assert not p[3].any()
        kept = p[[0, 1, 2, 4]]
        np.testing.assert_allclose(kept @ kept.T, np.eye(4), atol=1e-6)
        np.testing.assert_allclose(vectors @ kept.T @ kept, vectors, atol=1e-5)
    vectors[2, 7] = np.nan
    p = of(vectors.reshape(-1))
    module.orthonormalize(p, p, rank=5)
    assert np.isnan(np.asarray(p).reshape(5, 40)[2:]).any(axis=1).all()


@pytest.mark.parametrize("module", [cpu, reference])
def test_orthonormalize(module):
    assert_orthonormal(module)


@native_only
def test_powersgd_needs_the_same_kernels_on_all_ranks():
    """Its `same_kernels`: every rank orthonormalizes, and of nearly parallel vectors what is left
    shows how sums were rounded."""
    vector = np.random.default_rng(0).standard_normal(100_000)
    mine = np.concatenate(
        [vector, vector + 3e-6 * np.random.default_rng(1).standard_normal(100_000)]
    ).astype(np.float32)
    its = mine.copy()
    cpu.orthonormalize(mine, mine, rank=2)
    reference.orthonormalize(its, its, rank=2)
    np.testing.assert_allclose(mine, its, atol=1e-6)
    assert (mine != its).any()


@native_only
@examples(120)
@given(data=st.data())
def test_buckets_of_norm_l2_agree_to_rounding(data):
    """Norms to rounding; levels to one, where the last bit of a norm tips the scales."""
    a = Arguments(data)
    grad, options = a.any(), dict(**buckets(a), l2=True, limit=0.0, key=a.draw(KEYS))
    outs, results = [], []
    for module in (cpu, reference):
        results.append(module.encode_buckets(grad.copy(), **options))
        outs.append(np.zeros_like(grad))
        reference.decode_add_buckets(
            outs[-1],
            body_of(results[-1]),
            steps=options["steps"],
            bucket=options["bucket"],
            scale=1.0,
        )
    assert results[0].finite == results[1].finite
    if results[0].finite:
        count = -(-a.size // options["bucket"])
        norms, expected = (
            body_of(result)[1 : 1 + 4 * count].copy().view(np.float32) for result in results
        )
        np.testing.assert_allclose(norms, expected, rtol=1e-6)
        norm = np.repeat(np.maximum(expected, 1e-45), options["bucket"])[: a.size]
        off = np.abs(outs[0].astype(np.float64) - outs[1]) / norm
        assert (off <= 1.001 / options["steps"]).all() and (off > 1e-5).sum() <= 2 + a.size // 1000
