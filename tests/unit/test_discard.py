"""Steps that are forgotten leave no trace, and state follows a loss scale, bit for bit, in every
algorithm."""

import numpy as np
import pytest
from ranks import assert_same, copy_of, discardable, gradients, ranks_of, rescale

from horovod_compress import available, get_compressor
from horovod_compress.engine.checkpoint import copies
from horovod_compress.engine.discard import discard
from horovod_compress.engine.exchange import Exchange
from horovod_compress.engine.lockstep import finish_step, run_step, start_step
from horovod_compress.transport.loopback import Loopback

SPECS = [
    *available(),
    "dgc:momentum=0.9",
    "dgc:momentum=0.5,nesterov=true,dense=fp16",
    "dgc:momentum=0.5,dense=int8",
    "variance:tau=0.5",
    "maxnorm:ratio=0.1",
]
# In half precision another scale is another rounding.
KEEPS_STATE = [
    spec for spec in SPECS if any(ranks_of(spec)[0].arrays().values()) and "fp16" not in spec
]


@pytest.mark.parametrize(
    "how", ["discarded", "discarded after the next step was asked for", "not finite", "abandoned"]
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_forgotten_step_leaves_no_trace(spec, how):
    exchanges = discardable(ranks_of(spec))
    for step in range(3):
        run_step(exchanges, gradients(step))
    before = [copy_of(ex) for ex in exchanges]
    grads = gradients(7)
    if how == "not finite":
        grads[1]["w"][5] = np.inf
    if how == "abandoned":
        start_step(exchanges, grads)
        run_step(exchanges, gradients(8))
        [discard(ex) for ex in exchanges]
    else:
        run_step(exchanges, grads)
    if "asked" in how:
        [ex.end_step() for ex in exchanges]
    if how.startswith("discarded"):
        [discard(ex) for ex in exchanges]
        [discard(ex) for ex in exchanges]  # once is enough
    for ex, state in zip(exchanges, before):
        assert_same(copy_of(ex), state)
        assert ex.stats()["steps_undone"] == (2 if how == "abandoned" else 1)
    for named in run_step(exchanges, gradients(4)):
        assert all(np.isfinite(g).all() for g in named.values())


def test_a_state_that_was_loaded_is_not_discarded():
    exchanges = discardable(ranks_of("topk"))
    run_step(exchanges, gradients(0))
    saved = [ex.state_dict() for ex in exchanges]
    run_step(exchanges, gradients(1))
    for ex, state in zip(exchanges, saved):
        ex.load_state_dict(state)
        discard(ex)
        assert_same(copy_of(ex), state["tensors"])
    undone = [ex.stats()["steps_undone"] for ex in exchanges]
    run_step(exchanges, gradients(2))  # the next step counts
    assert [ex.stats()["steps_undone"] for ex in exchanges] == undone == [0, 0]


@pytest.mark.parametrize("spec", KEEPS_STATE)
def test_state_follows_the_loss_scale(spec):
    plain, scaled = ranks_of(spec), ranks_of(spec)
    for step, scale in enumerate((2.0**16, 2.0**16, 2.0**15, 2.0**3, 2.0**24)):
        results = []
        for exchanges, factor in ((plain, 1.0), (scaled, scale)):
            rescale(exchanges, factor)
            grads = gradients(step)
            for g in (g for named in grads for g in named.values()):
                g *= np.float32(factor)
            results.append([g / np.float32(factor) for g in run_step(exchanges, grads)[0].values()])
        for expected, found in zip(*results):
            np.testing.assert_array_equal(found, expected)
        for a, b in zip(plain, scaled):
            assert_same(a.state_dict()["tensors"], b.state_dict()["tensors"])
    assert scaled[0].stats()["residual_norm"] == pytest.approx(
        plain[0].stats()["residual_norm"], rel=1e-6
    )
    for ex, other in zip(ranks_of(spec), scaled):
        rescale([ex], 8.0)
        ex.load_state_dict(other.state_dict())
        assert_same(ex.state_dict()["tensors"], other.state_dict()["tensors"])


def test_sums_of_samples_squares_follow_the_loss_scale():
    states = []
    for scale in (1.0, 2.0**16):
        exchanges = ranks_of("variance:moments=microbatch,tau=0.5,min_numel=0")
        rescale(exchanges, scale)
        for step in range(3):
            grads = [
                {name: g * np.float32(scale) for name, g in named.items()}
                for named in gradients(step)
            ]
            squares = [{name: np.square(g) for name, g in named.items()} for named in grads]
            finish_step(exchanges, start_step(exchanges, grads, squares=squares), grads)
        states.append([copy_of(exchange) for exchange in exchanges])
    for plain, scaled in zip(*states):
        assert np.any(plain["w"]["v"])
        assert_same(scaled, plain)


def test_clipping_is_of_true_gradients():
    for scale in (1.0, 2.0**20):
        exchanges = ranks_of("dgc:ratio=1,masking=false,momentum=0,clip_norm=0.001")
        grads = gradients(0)
        for named in grads:
            for g in named.values():
                g *= np.float32(scale)
        rescale(exchanges, scale)
        run_step(exchanges, grads)
        norm = sum(np.square(g / scale).sum() for g in grads[0].values()) ** 0.5
        assert 0 < norm <= 0.001 * 1.0001


@pytest.mark.parametrize("small", ["fp16", "int8"])
def test_clipping_is_alike_however_small_tensors_travel(small):
    """Of gradients of one size, whose codes are exact."""
    found = []
    for dense in ("fp32", small):
        exchanges = ranks_of(f"dgc:momentum=0,clip_norm=0.5,min_numel=100000,dense={dense}")
        grads = [{"w": np.full(1200, 2, np.float32)} for _ in exchanges]
        found.append(run_step(exchanges, grads)[0]["w"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


def test_signs_get_the_loss_scale():
    exchanges = ranks_of("signsgd:min_numel=0")
    rescale(exchanges, 1024.0)
    results = run_step(exchanges, [{"w": np.full(1200, -3, np.float32)} for _ in exchanges])
    np.testing.assert_array_equal(results[0]["w"], -1024)


def test_forgetting_must_be_asked_for():
    with pytest.raises(RuntimeError, match="discardable=True"):
        discard(ranks_of("topk")[0])


def one_rank():
    compressor = get_compressor("topk:ratio=0.25,min_numel=0")
    return discardable([Exchange(compressor, Loopback.group(1)[0], {"w": ((4,), compressor)})])[0]


def test_discarding_in_the_middle_of_a_step_changes_nothing():
    exchange, twin = (one_rank() for _ in range(2))
    for ex in (exchange, twin):
        grad = np.array([1, 2, 3, 10], np.float32)
        carrier = ex.submit("w", grad)
        if ex is exchange:
            with pytest.raises(RuntimeError, match="under way"):
                discard(ex)
        ex.finish("w", carrier)
        assert ex.succeeded
    assert_same(exchange.arrays(), twin.arrays())


def test_a_change_of_scale_before_a_step_is_discarded():
    exchange = one_rank()
    for grad in ([1, 2, 3, 10], [0, 0, 0, 1]):
        exchange.finish("w", exchange.submit("w", np.array(grad, np.float32)))
        exchange.end_step()
    rescale([exchange], 1024.0)
    discard(exchange)
    np.testing.assert_array_equal(exchange.state_dict()["tensors"]["w"]["residual"], [1, 2, 3, 0])


def test_half_precision_travels_scaled():
    """Gradients that float16 has no digits for arrive, where a loss scale lifts them."""
    (exchange,) = ranks_of("dgc:momentum=0.5,min_numel=100000,dense=fp16", 1)
    rescale([exchange], 2.0**24)
    grads = [{"w": np.full(1200, 1e-9 * 2**24, np.float32)}]
    found = run_step([exchange], grads)[0]["w"] / np.float32(2**24)
    np.testing.assert_allclose(found, 1e-9, rtol=1e-3)
    np.testing.assert_allclose(exchange.arrays()["w"]["u"], 1e-9, rtol=1e-3)


def test_a_result_that_leaves_float32_by_its_loss_scale_is_not_finite():
    (exchange,) = ranks_of("dgc:momentum=0.9,min_numel=100000", 1)
    rescale([exchange], 2.0**24)
    found = []
    for _ in range(2):
        run_step([exchange], [{"w": np.full(1200, 2e38, np.float32)}])
        found.append(exchange.succeeded)
    assert found == [True, False]


def test_copies_use_memory_that_fits():
    """It does not where an array has become shorter or longer, as by a switch."""
    memory = {"u": np.zeros(3, np.float32), "v": np.zeros((1, 3), np.float32)}
    found = copies({"u": np.ones(3, np.float32), "v": np.ones(3, np.float32)}, memory)
    assert found["u"] is memory["u"] and found["v"] is not memory["v"]
    assert all(np.array_equal(array, np.ones(3)) for array in found.values())
