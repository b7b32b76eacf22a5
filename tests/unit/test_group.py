"""Tensors that go together: nothing is another than where each goes alone, but for the number of
calls and messages."""

import itertools
import sys

import numpy as np
import pytest
from ranks import SHAPES, copy_of, gradients, ranks_of

from horovod_compress import WireError, kernels
from horovod_compress.engine import group
from horovod_compress.engine.lockstep import mean_of, run_step
from horovod_compress.transport.loopback import Loopback

ALL = {**SHAPES, "y": (50, 60), "a": (20, 20), "norm": (60,)}
STEPS = 6
SPECS = [
    "topk:ratio=0.1",
    "dgc:ratio=0.05,values=sign,momentum=0.9",
    "dgc:ratio=0.05,clip_norm=1",
    "qsgd:min_numel=0",
    "adacomp",
    "maxnorm:min_numel=0",
    "powersgd:rank=2,min_rate=1",
    "fp16",
    "topk:ratio=0.1,dense=int8",
]


class Watched(Loopback):
    """Keeps the names of messages."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.names = []

    def allgather(self, name, payload):
        self.names.append(name)
        return super().allgather(name, payload)

    def allreduce(self, name, array, op="sum"):
        self.names.append(name)
        return super().allreduce(name, array, op)


def steps(exchanges, missing=(), based=(), before_fifth=lambda exchange: None):
    """Results of steps in which ranks submit in orders of their own, the fourth not finite, and the
    last without some tensors. based: those whose gradients count from a base."""
    results = []
    bases = {name: np.full(np.prod(ALL[name]), 2, np.float32) for name in based}
    for step in range(STEPS):
        grads = gradients(step, len(exchanges), ALL)
        for exchange in exchanges if step == 4 else ():
            exchange.end_step()
            before_fifth(exchange)
        for named in grads:
            for name, base in bases.items():
                named[name] += base
        grads[-1]["x"][3] = np.nan if step == 3 else 1
        names = [name for name in ALL if step < STEPS - 1 or name not in missing]
        carriers = [
            {
                name: exchange.submit(name, named[name], base=bases.get(name))
                for name in np.roll(names, rank)
            }
            for rank, (exchange, named) in enumerate(zip(exchanges, grads))
        ]
        for _ in itertools.zip_longest(*(exchange.rounds() for exchange in exchanges)):
            pass
        for name in names:
            reduced = mean_of([named[name] for named in carriers])
            for exchange in exchanges:
                exchange.finish(name, reduced)
        results.append(grads)
    return results, [copy_of(exchange) for exchange in exchanges]


@pytest.mark.parametrize("missing", [(), ("w", "bias"), ("w", "x", "a")])
@pytest.mark.parametrize("spec", SPECS)
def test_results_and_states_are_those_of_tensors_alone(spec, missing, monkeypatch):
    together = ranks_of(spec, 3, ALL)
    found = steps(together, missing)
    assert len(set(together[0]._group_of.values())) <= 2
    monkeypatch.setattr(group, "MOST", 0)
    alone = ranks_of(spec, 3, ALL)
    np.testing.assert_equal(found, steps(alone, missing))
    assert len(set(alone[0]._group_of.values())) == len(ALL)


@pytest.mark.parametrize("based", [("w", "x"), ("x", "y", "norm"), ("y", "a", "bias")])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "dgc:ratio=0.05,momentum=0", "adacomp", "none"])
def test_some_gradients_of_a_group_may_count_from_a_base(spec, based, monkeypatch):
    found = steps(ranks_of(spec, 3, ALL), based=based)
    monkeypatch.setattr(group, "MOST", 0)
    np.testing.assert_equal(found, steps(ranks_of(spec, 3, ALL), based=based))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("dense", ["fp32", "fp16", "int8"])
def test_some_tensors_of_a_group_may_get_another_momentum(dense, momentum, monkeypatch):
    def change(exchange):
        for name in ("bias", "y"):
            exchange.tensors.replace(name, momentum=0.5)
        exchange.expect(scale=2.0**-3)

    spec = f"dgc:ratio=0.05,momentum={momentum},dense={dense}"
    found = steps(ranks_of(spec, 3, ALL), before_fifth=change)
    monkeypatch.setattr(group, "MOST", 0)
    np.testing.assert_equal(found, steps(ranks_of(spec, 3, ALL), before_fifth=change))


def many(count):
    return {f"t{i}": (32, 32) for i in range(count)}


def counted(spec, count, event, is_counted):
    """How often a step of so many tensors has an event, on one rank, that counts."""
    (exchange,) = ranks_of(spec, 1, many(count))
    for seed in range(2):
        run_step([exchange], gradients(seed, 1, many(count)))
    exchange.end_step()
    (grads,), found = gradients(2, 1, many(count)), 0

    def look(frame, its_event, argument):
        nonlocal found
        found += its_event == event and is_counted(frame, argument)

    sys.setprofile(look)
    try:
        carriers = {name: exchange.submit(name, grad) for name, grad in grads.items()}
        exchange.flush()
        for name, carrier in carriers.items():
            exchange.finish(name, carrier, now=False)
        exchange.end_step()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    "spec, most", [("topk:min_numel=0", 8), ("dgc:momentum=0.9,min_numel=0", 8), ("none", 6)]
)
def test_a_further_tensor_costs_few_calls_of_python(spec, most):
    few, more = (counted(spec, count, "call", lambda *_: True) for count in (20, 40))
    assert (more - few) / 20 <= most


@pytest.mark.skipif(kernels.backend != "native", reason="the native kernels are not built")
@pytest.mark.parametrize("spec", ["topk:min_numel=0", "adacomp", "maxnorm", "none", "fp16"])
def test_a_group_costs_as_many_kernels_calls_whatever_its_tensors(spec):
    def is_kernel(_, function):
        return "_native" in str(getattr(function, "__module__", None))

    few, more = (counted(spec, count, "c_call", is_kernel) for count in (20, 40))
    if spec == "fp16":
        # The reducer takes tensors one by one.
        few, more = few - 20, more - 40
    assert few == more


@pytest.mark.parametrize("spec", ["topk:min_numel=0", "maxnorm:min_numel=0"])
def test_a_group_is_one_message(spec):
    sent = []
    for count in 3, 30:
        exchanges = ranks_of(spec, 2, many(count), Watched)
        run_step(exchanges, gradients(0, 2, many(count)))
        sent.append(exchanges[0].transport.names)
    few, more = sent
    assert len(few) == len(more) == (1 if "topk" in spec else 3)


def test_a_group_leaves_with_the_last_of_its_tensors(monkeypatch):
    monkeypatch.setattr(group, "MOST", 3000)
    (exchange,) = ranks_of("topk:ratio=0.1,min_numel=0", 1, ALL, Watched)
    groups = group.form(exchange.tensors, True, exchange.transport.frame_length, False)
    assert [[tensor.name for tensor in each.tensors] for each in groups] == [
        ["norm", "a"],
        ["y"],
        ["bias", "x", "w"],
    ]
    grads = gradients(0, 1, ALL)[0]
    for name, message in zip(reversed(ALL), [0, 1, 2, 2, 2, 3]):
        exchange.submit(name, grads[name])
        assert len(exchange.transport.names) == message
    assert not any(grad.any() for grad in grads.values())


def test_types_of_a_group_may_differ():
    shapes = {"a": (2,), "b": (3,), "c": (2,)}
    exchanges = ranks_of("none", 2, shapes)
    results = [{"a": np.full(2, 1e300), "b": np.ones(3, np.float32), "c": np.ones(2)} for _ in "12"]
    results[1]["c"][1] = np.nan
    run_step(exchanges, results)
    for exchange, named in zip(exchanges, results):
        assert [named[name].tolist() for name in "ab"] == [[1e300] * 2, [1] * 3]
        assert np.isnan(named["c"][1]) and not exchange.succeeded


def test_gradients_of_a_step_that_is_given_up_stay():
    (exchange,) = ranks_of("topk:ratio=0.1,decay=0.5", 1, ALL, Watched)
    grads = [gradients(step, 1, ALL)[0]["w"] for step in range(2)]
    for grad in grads:
        exchange.submit("w", grad.copy())
    exchange.rollback()
    np.testing.assert_allclose(exchange.arrays()["w"]["residual"], sum(grads), rtol=1e-6)
    assert not exchange.transport.names


def test_they_leave_where_a_result_was_interrupted():
    (exchange,) = ranks_of("topk:ratio=0.1", 1, ALL, Watched)
    exchange.submit("w", gradients(0, 1, ALL)[0]["w"])
    exchange.fail_tensor("w")
    assert len(exchange.transport.names) == 1 and not exchange.succeeded


class Damaging(Loopback):
    """Rank 1's message has another byte, or is cut off."""

    cut = False

    def allgather(self, name, payload):
        if self.rank == 1:
            payload = payload[:-1] if self.cut else payload.copy()
            payload[len(payload) // 2] ^= 1
        return super().allgather(name, payload)


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_message_is_an_error_once_and_undone(cut, monkeypatch):
    monkeypatch.setattr(Damaging, "cut", cut)
    names = {"w": (30, 40), "x": (40, 40)}
    exchanges = ranks_of("topk:ratio=0.1", 2, names, Damaging)
    grads = gradients(0, 2, names)
    kept = [{name: grad.copy() for name, grad in named.items()} for named in grads]
    for exchange, named in zip(exchanges, grads):
        for name, grad in named.items():
            exchange.submit(name, grad)
    for exchange, named in zip(exchanges, kept):
        exchange.flush()
        for name, match in zip(names, ("payload of rank 1", "its step has failed before")):
            with pytest.raises((WireError, RuntimeError), match=match):
                exchange.finish(name, np.ones(1, np.float32))
            exchange.fail_tensor(name)
        for name, arrays in exchange.arrays().items():
            np.testing.assert_array_equal(arrays["residual"], named[name])
