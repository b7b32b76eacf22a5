"""The exchange: transactions, not-finite gradients, abandoned steps, state, statistics, and ranks
in threads."""

import copy
import gc
import math
import tracemalloc
import weakref

import numpy as np
import pytest
from ranks import (
    SHAPES,
    assert_same,
    copy_of,
    discardable,
    gradients,
    on_all_ranks,
    ranks_of,
    rescale,
)

import horovod_compress as hc
from horovod_compress import kernels
from horovod_compress.engine.lockstep import run_step, start_step
from horovod_compress.kernels import HEADROOM
from horovod_compress.protocol.handshake import agree
from horovod_compress.protocol.requests import Collective
from horovod_compress.transport.loopback import Loopback


@pytest.mark.parametrize("spec, name", [("none", "w"), ("topk:ratio=0.01", "bias")])
def test_what_is_not_compressed_may_be_float64(spec, name):
    """And stays that. Others refuse it: their adapters hand over float32."""
    numbers = np.resize([1e-300, -1e-60, 1e60, 1 + 1e-12], 40)
    shapes = {name: (40,)}
    exchanges = ranks_of(spec, 2, shapes)
    assert all(exchange.tensors.carries_float64(name) for exchange in exchanges)
    for named in run_step(exchanges, [{name: numbers * (1 + 2 * rank)} for rank in range(2)]):
        np.testing.assert_array_equal(named[name], 2 * numbers)
    for poison in (np.nan, np.inf, -np.inf):
        run_step(
            exchanges,
            [{name: np.where(np.arange(40) == 7 + rank, poison, numbers)} for rank in range(2)],
        )
    exchanges[0].end_step()
    assert exchanges[0].stats()["steps_undone"] == 3
    (compressed,) = ranks_of("fp16", 1, shapes)
    with pytest.raises(ValueError, match="float32 in one dimension"):
        compressed.submit(name, numbers)
    (clipped,) = ranks_of("dgc:clip_norm=1", 1, shapes)
    assert not clipped.tensors.carries_float64(name)


@pytest.mark.parametrize(
    "spec",
    ["dgc:ratio=0.01", "dgc:ratio=0.01,values=fp16,nesterov=true", "dgc:ratio=0.01,momentum=0"],
)
@pytest.mark.parametrize("where", ["w", "bias"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_not_finite_gradient_is_seen_by_all_and_loses_nothing(spec, where, poison):
    exchanges = ranks_of(spec)
    for step in range(3):
        run_step(exchanges, gradients(step))
    before = [copy_of(ex) for ex in exchanges]
    grads = gradients(3)
    local = [{n: g.copy() for n, g in named.items()} for named in grads]
    grads[1][where][7] = local[1][where][7] = poison
    run_step(exchanges, grads)
    for named in grads:
        assert not np.isfinite(named[where]).all()
    for rank, ex in enumerate(exchanges):
        after = copy_of(ex)
        momentum = ex.tensors.compressor.policy.m
        for name in ("w", "x"):
            g = np.where(np.isfinite(local[rank][name]), local[rank][name], 0)
            kept = np.isfinite(local[rank][name])
            v, u = before[rank][name]["v"], before[rank][name].get("u", np.zeros_like(g))
            moved = (
                momentum * u + g
                if not ex.tensors.compressor.policy.nesterov
                else momentum * (u + g) + g
            )
            np.testing.assert_allclose(
                after[name]["v"][kept], (v + moved)[kept], rtol=1e-5, atol=1e-6
            )
            np.testing.assert_array_equal(after[name]["v"][~kept], v[~kept])
        # Where the mean was not finite the momentum of a dense tensor stays as it was; so it does.
        if "u" in after["bias"]:
            # In the other dense tensors.
            np.testing.assert_array_equal(after["bias"]["u"], before[rank]["bias"]["u"])
        assert ex.stats()["steps_undone"] == 1
    for named in run_step(exchanges, gradients(4)):
        assert all(np.isfinite(g).all() for g in named.values())


def test_not_finite_in_a_dense_step_of_a_compressed_tensor():
    exchanges = ranks_of("dgc:schedule=0/1.0+2/0.01")
    run_step(exchanges, gradients(0))
    before = [copy_of(ex) for ex in exchanges]
    grads = gradients(1)
    good = grads[0]["w"].copy()
    grads[1]["w"][3] = np.inf
    run_step(exchanges, grads)
    assert not np.isfinite(grads[0]["w"]).all()
    after = exchanges[0].arrays()
    np.testing.assert_allclose(
        after["w"]["v"], np.float32(0.9) * before[0]["w"]["u"] + good, rtol=1e-5, atol=1e-6
    )
    assert np.isfinite(exchanges[1].arrays()["w"]["v"]).all()


def test_sums_that_overflow_are_seen_and_given_back():
    exchanges = ranks_of("dgc:ratio=0.01,momentum=0", shapes={"w": (40, 40)})
    grads = [{"w": np.zeros(1600, np.float32)} for _ in exchanges]
    for named in grads:
        named["w"][5] = 1e33
    for ex in exchanges:
        ex.submit("w", grads[exchanges.index(ex)]["w"])
    for ex in exchanges:
        ex.finish("w", np.full(1, 1e6, np.float32))  # op=Sum and a postscale_factor
    assert all(np.isinf(named["w"][5]) for named in grads)
    assert all(ex.arrays()["w"]["v"][5] == np.float32(1e33) for ex in exchanges)


def test_momentum_of_a_dense_tensor_that_overflows_goes_back():
    (exchange,) = ranks_of("dgc", size=1)
    for g, finite in ((3e38, True), (3e38, False), (1.0, True)):
        grads = [{"bias": np.full(40, g, np.float32)}]
        run_step([exchange], grads)
        assert np.isfinite(grads[0]["bias"]).all() == finite
    assert (
        np.isfinite(exchange.arrays()["bias"]["u"]).all() and exchange.stats()["steps_undone"] == 1
    )


def test_a_step_that_is_abandoned_after_a_flush_is_undone():
    for spec in ("dgc:ratio=0.01", "dgc:ratio=0.01,clip_norm=1"):
        exchanges = ranks_of(spec)
        run_step(exchanges, gradients(0))
        for ex, named in zip(exchanges, gradients(1)):
            ex.submit("w", named["w"])
            ex.flush()
        assert exchanges[0].under_way
        with pytest.raises(RuntimeError, match="under way"):
            exchanges[0].state_dict()
        run_step(exchanges, gradients(2))  # submits "w" again
        assert [ex.stats()["steps_undone"] for ex in exchanges] == [1, 1]
        total = sum(ex.arrays()["w"]["v"].astype(np.float64) for ex in exchanges)
        assert np.isfinite(total).all()


def test_a_carrier_that_was_reduced_before_clipping_is_kept():
    """With clipping a payload is made when the host has its carriers back; op=Sum brings 2 on 2
    ranks."""
    means, sums = (ranks_of("dgc:ratio=0.01,clip_norm=1,momentum=0") for _ in range(2))
    (mean, *_), summed = run_step(means, gradients(0)), gradients(0)
    carriers = [{n: ex.submit(n, g) for n, g in named.items()} for ex, named in zip(sums, summed)]
    for named in carriers:
        for carrier in named.values():
            carrier *= 2
    for ex in sums:
        ex.flush()
    for ex, named in zip(sums, carriers):
        for name, carrier in named.items():
            ex.finish(name, carrier)
    for name in SHAPES:
        np.testing.assert_allclose(summed[0][name], 2 * mean[name], rtol=1e-6)


def test_state_dict_continues_bit_for_bit_and_is_a_copy():
    spec = "dgc:ratio=0.02,values=bf16,warmup_steps=6,nesterov=true"
    exchanges = ranks_of(spec)
    for step in range(4):
        run_step(exchanges, gradients(step))
    saved = [ex.state_dict() for ex in exchanges]
    first = [run_step(exchanges, gradients(step)) for step in range(4, 8)]
    again = ranks_of(spec)
    for ex, state in zip(again, saved):
        ex.load_state_dict(state)
    second = [run_step(again, gradients(step)) for step in range(4, 8)]
    for a, b in zip(first, second):
        assert_same({"": a[0]}, {"": b[0]})
    for a, b in zip(exchanges, again):
        assert_same(a.arrays(), b.arrays())


def test_a_state_that_does_not_fit_changes_nothing():
    exchange, other = ranks_of("dgc:ratio=0.02")
    run_step([exchange, other], gradients(0))
    good = exchange.state_dict()
    before = copy_of(exchange)
    wider = ranks_of("dgc:ratio=0.02", shapes={**SHAPES, "w": (30, 41)})[0].state_dict()
    larger = ranks_of("dgc:ratio=0.02", size=3)[0].state_dict()
    for state, words in (
        ({}, "not a state_dict"),
        ({**good, "format": 2}, "format"),
        (other.state_dict(), "rank is 1"),
        (larger, "size is 3"),
        (wider, r"w.u is float32 of \(1230,\)"),
        (ranks_of("dgc:momentum=0")[0].state_dict(), "w.u is missing"),
        (ranks_of("none")[0].state_dict(), "id is none"),
        ({**good, "step": -5}, "step is -5"),
        (
            {**good, "tensors": {**good["tensors"], "x": dict.fromkeys("uv", np.zeros(1600))}},
            "x.u is float64",
        ),
        (
            {**good, "tensors": {k: v for k, v in good["tensors"].items() if k != "x"}},
            "x is missing",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            exchange.load_state_dict(state)
        assert_same(copy_of(exchange), before)


def test_statistics_count_every_byte():
    exchanges = ranks_of("dgc:ratio=0.01,min_k=14")
    run_step(exchanges, gradients(0))
    stats = exchanges[0].stats()
    entries = 14 + 16
    assert stats["elements_sent"] == entries + 40
    assert stats["dense_bytes"] == 4 * (1200 + 1600 + 40)
    frames = stats["bytes_sent"] - 4 * 40 - 2 * 4
    assert 2 * HEADROOM + 4 * entries < frames < 2 * HEADROOM + 6 * entries + 6
    assert stats["ratio"] == stats["dense_bytes"] / stats["bytes_sent"]
    assert stats["steps"] == 1 and stats["steps_undone"] == 0
    # The other rank's frames are as long.
    assert stats["bytes_received"] == stats["bytes_sent"]
    assert stats["residual_norm"] == pytest.approx(
        np.sqrt(
            sum((exchanges[0].arrays()[n]["v"].astype(np.float64) ** 2).sum() for n in ("w", "x"))
        ),
        rel=1e-6,
    )


@pytest.mark.skipif(kernels.backend != "native", reason="the reference makes temporary arrays")
@pytest.mark.parametrize(
    "spec", ["dgc:ratio=0.001", "dgc:ratio=0.001,nesterov=true,values=fp16,exclude=y", "none"]
)
def test_a_step_allocates_nothing_of_gradient_size(spec):
    shapes = {"w": (1000, 1000), "x": (500, 1000), "y": (300, 1000), "bias": (1000,)}
    exchanges = ranks_of(spec, size=1, shapes=shapes)
    run_step(exchanges, gradients(0, 1, shapes))
    run_step(exchanges, gradients(1, 1, shapes))
    ((exchange,), (grads,)) = exchanges, gradients(2, 1, shapes)
    tracemalloc.start()
    carriers = {name: exchange.submit(name, grad) for name, grad in grads.items()}
    for name, carrier in carriers.items():
        exchange.finish(name, carrier)
    exchange.end_step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.02 * sum(grad.nbytes for grad in grads.values())


@pytest.mark.skipif(
    kernels.backend != "native", reason="the reference does not look at its arguments first"
)
@pytest.mark.parametrize("names", [("w", "x"), ("w",)])
def test_a_refused_gradient_leaves_what_the_residual_owes(names):
    """It is an error once: with the last of its group, or where its step is given up before."""
    (exchange,) = ranks_of("adacomp", size=1)
    (given,) = gradients(0, size=1)
    (sent,) = run_step([exchange], [{n: g.copy() for n, g in given.items()}])
    refused = {name: np.zeros_like(given[name]) for name in names}
    refused["w"].flags.writeable = False
    with pytest.raises(ValueError):
        for name, grad in refused.items():
            exchange.submit(name, grad)
        exchange.rollback()
    (later,) = run_step([exchange], [{n: np.zeros_like(g) for n, g in given.items()}])
    residual = exchange.arrays()["w"]["residual"]
    np.testing.assert_allclose(sent["w"] + later["w"] + residual, given["w"], atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        *hc.available(),
        "dgc:ratio=0.01,momentum=0",
        "topk:ratio=0.05,chunk=100",
        "topk:ratio=0.1,dense=fp16",
    ],
)
def test_a_gradient_may_count_from_a_base(spec):
    """Then the result is added to the base, and the state is that of the difference."""
    plain, based = ranks_of(spec), ranks_of(spec)
    bases = {name: np.full(math.prod(shape), 3, np.float32) for name, shape in SHAPES.items()}
    for ex in based:
        ex.submit = lambda name, grad, *known, submit=ex.submit: submit(
            name, grad, *known, base=bases[name]
        )
    for step in range(6):
        # Exact, and so are sums with 3.
        grads = [
            {name: np.round(64 * g) / 64 for name, g in named.items()} for named in gradients(step)
        ]
        if step == 3:
            grads[1]["w"][7] = grads[1]["bias"][0] = np.nan
        moved = [{name: bases[name] + g for name, g in named.items()} for named in grads]
        run_step(plain, grads)
        run_step(based, moved)
        for named, its in zip(grads, moved):
            for name, g in named.items():
                np.testing.assert_allclose(its[name] - bases[name], g, atol=2e-6, err_msg=name)
        for ex, its in zip(plain, based):
            assert_same(copy_of(ex), copy_of(its))
            assert ex.stats()["bytes_sent"] == its.stats()["bytes_sent"]


@pytest.mark.parametrize("spec", ["adacomp", "powersgd:rank=1"])
def test_a_step_that_sent_nothing_leaves_what_the_residual_owes(spec):
    (exchange,) = ranks_of(spec, size=1)
    (given,) = gradients(0, size=1)
    (sent,) = run_step([exchange], [{n: g.copy() for n, g in given.items()}])
    exchange.end_step()
    tensor = exchange.tensors["w"]
    # As after a gradient that was refused.
    tensor.compressor.commit(tensor.state)
    np.testing.assert_allclose(
        sent["w"] + exchange.arrays()["w"]["residual"], given["w"], atol=1e-5
    )


def test_wrong_submissions_are_errors():
    exchange = ranks_of("dgc", size=1)[0]
    for name, grad, error in (
        ("w", np.zeros(1200, np.float64), ValueError),
        ("w", np.zeros(1199, np.float32), ValueError),
        ("w", np.zeros((30, 40), np.float32), ValueError),
        ("unknown", np.zeros(3, np.float32), ValueError),
    ):
        with pytest.raises(error, match=name):
            exchange.submit(name, grad)
    assert not exchange.under_way


@pytest.mark.parametrize(
    "spec", ["globalrandk:ratio=0.1", "maxnorm", "powersgd:start_step=3,rank=2", "signsgd"]
)
@pytest.mark.parametrize("begin", [0, 2**33])
def test_sums_of_ranks_at_different_steps_are_refused_on_all(spec, begin):
    exchanges, ahead = ranks_of(spec), ranks_of(spec)
    for exchange in exchanges + ahead:
        exchange.expect(index=begin)
    for step in range(2):
        run_step(exchanges, gradients(step))
    for step in range(5):
        run_step(ahead, gradients(step))
    exchanges[1].load_state_dict(ahead[1].state_dict())
    grads = gradients(7)
    for ex, named in zip(exchanges, grads):
        for name, grad in named.items():
            ex.submit(name, grad)
    rounds = [ex.rounds() for ex in exchanges]
    for its in rounds:  # all ranks start before any waits
        next(its, None)
    for ex, its in zip(exchanges, rounds):
        with pytest.raises(hc.MismatchError, match="at step"):
            next(its, None)
            ex.finish("w", np.ones(1, np.float32))


def test_loopback_says_who_is_missing_or_twice():
    first, second = Loopback.group(2)
    wait = first.allgather("a", np.zeros(3, np.uint8))
    with pytest.raises(RuntimeError, match=r"ranks \[1\]"):
        wait()
    with pytest.raises(RuntimeError, match="twice"):
        first.allgather("a", np.zeros(3, np.uint8))
    second.allgather("a", np.ones(2, np.uint8))
    assert wait().tolist() == [0, 0, 0, 1, 1]


def test_handshake_names_the_first_difference_on_every_rank():
    base = {
        "options": {"id": "dgc", "ratio": 0.1, "decay": 0},
        "tensors": {"w": {"shape": [3, 4]}, "x": {"shape": [1]}},
    }
    for change, words in (
        (lambda d: d["options"].update(ratio=0.2), "options.ratio: 0.2 on rank 2, 0.1 on rank 0"),
        (lambda d: d["tensors"]["w"].update(shape=[4, 3]), r"tensors.w.shape: \[4, 3\] on rank 2"),
        (lambda d: d["tensors"].pop("x"), "tensors.x: missing on rank 2, there on rank 0"),
        (lambda d: d["tensors"].update(y=1), "tensors.y: there on rank 2, missing on rank 0"),
        (lambda d: d.update(tensors=dict(reversed(d["tensors"].items()))), None),
        (lambda d: d["options"].update(decay=0.0), None),
    ):

        def rank_of(rank, transport):
            description = copy.deepcopy(base)
            if rank == 2:
                change(description)
            try:
                agree(transport, "hvdc", description)
            except hc.MismatchError as error:
                return error

        errors = on_all_ranks(rank_of, range(3))
        if words is None:
            assert errors == [None] * 3
        else:
            for error in errors:
                with pytest.raises(hc.MismatchError, match=words):
                    raise error


@pytest.mark.parametrize(
    "id",
    [
        *hc.available(),
        "multiscale:bits=2+4+8",
        "multiscale:bits=10+12",
        "maxnorm:bits=16",
        "maxnorm:ratio=0.1",
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])  # from 5 ranks on bf16 goes dense
def test_a_step_moves_what_its_compressor_declares(id, size):
    moved = []

    class Asked(Loopback):
        """Keeps what is moved, but for the numbers of steps."""

        def allgather(self, name, payload):
            moved.append(Collective("allgather", payload.dtype.name))
            return super().allgather(name, payload)

        def allreduce(self, name, array, op="sum"):
            if not name.endswith(":step"):
                moved.append(Collective("allreduce", array.dtype.name, op))
            return super().allreduce(name, array, op)

    shapes, declared = {"a": (40, 50)}, hc.get_compressor(id).collectives(size)
    exchanges = ranks_of(id, size, shapes, Asked)
    carriers = start_step(exchanges, gradients(0, size, shapes))
    for carrier in carriers[0].values():
        if declared[0].verb == "reducer":
            assert [Collective("reducer", carrier.dtype.name)] == list(declared) and not moved
        else:
            assert moved[::size] == list(declared) and carrier.size == 1


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "dgc:momentum=0.9,min_numel=100000"])
def test_nothing_is_held_between_steps_that_is_not_state(spec):
    """Neither gradients, under a loss scale, nor an exchange that nobody uses."""
    exchanges = discardable(ranks_of(spec))
    rescale(exchanges, 1024.0)
    grads = gradients(0)
    run_step(exchanges, grads)
    left = [weakref.ref(g) for named in grads for g in named.values()]
    del grads
    assert not any(each() is not None for each in left)
    left = [weakref.ref(exchange) for exchange in exchanges]
    collects = gc.isenabled()
    gc.disable()
    del exchanges
    still = [each() for each in left]
    if collects:
        gc.enable()
    assert still == [None, None]
