"""Ranks in one process: every verb that a step may ask for."""

import dataclasses
import re

import numpy as np
import pytest

import horovod_compress as hc
from horovod_compress.compressors.base import Compressor
from horovod_compress.engine.lockstep import make_ranks
from horovod_compress.kernels import Encoded, new_body
from horovod_compress.protocol.requests import (
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
)
from horovod_compress.transport.loopback import Loopback


@dataclasses.dataclass(frozen=True, repr=False)
class EveryVerb(Compressor):
    """Agrees on ranks' numbers by each collective before it sends the gradient."""

    id = "everyverb"

    def collectives(self, size):
        gather, reduce = Collective("allgather", "uint8"), Collective("allreduce", "float32", "sum")
        return (
            gather,
            Collective("alltoall", "uint8"),
            Collective("allreduce", "int32", "sum"),
            reduce,
        )

    def encode(self, grad, state, step):
        mine = np.full(step.rank + 1, step.rank, np.uint8)
        everybody = yield Allgather(mine)
        assert everybody.tolist() == [rank for rank in range(step.size) for _ in range(rank + 1)]
        parts = yield Alltoall(np.repeat(mine[:1], step.size * 2), [2] * step.size)
        assert [part.tolist() for part in parts] == [[rank] * 2 for rank in range(step.size)]
        total = yield Allreduce(np.array([step.rank], np.int32))
        assert total.tolist() == [sum(range(step.size))]
        return Allreduce(grad)

    def decode(self, summed, out, state, step, scale):
        np.multiply(summed, np.float32(scale), out=out)
        return bool(np.isfinite(out).all())


def test_every_collective_may_come_before_the_payload():
    rng = np.random.default_rng(0)
    grads = [
        [{name: rng.standard_normal((3, 5)).astype(np.float32) for name in "ab"} for _ in range(3)]
        for _ in range(2)
    ]
    run = hc.simulate(EveryVerb(), grads)
    for ranks, mean in zip(grads, run.mean):
        for name in "ab":
            np.testing.assert_allclose(
                mean[name], sum(named[name] for named in ranks) / 3, rtol=1e-5, atol=1e-6
            )
    carriers, numbers = 2 * 4, 3 * 8
    assert (
        run.bytes_sent
        == [[carriers + numbers + 2 * (rank + 1 + 6 + 4 + 60) for rank in range(3)]] * 2
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Mistaken(Compressor):
    """Its encode yields and returns what a test puts here."""

    id = "mistaken"
    yields = returns = None
    says = (Collective("alltoall", "uint8"), Collective("allgather", "uint8"))

    def collectives(self, size):
        return self.says

    def encode(self, grad, state, step):
        if type(self).yields is None:
            return type(self).returns
        return self.rounds()

    def rounds(self):
        yield type(self).yields
        return type(self).returns


@pytest.mark.parametrize(
    "yields, returns, words",
    [
        (
            None,
            None,
            "encode returns Encoded, Allreduce or ToReducer, the same for all tensors of a step, "
            "not an object of <class 'NoneType'>",
        ),
        (None, b"body", "not an object of <class 'bytes'>"),
        (
            "sum",
            Allreduce(np.zeros(1, np.float32)),
            "encode yields Allreduce, Allgather or Alltoall, not an object of <class 'str'>",
        ),
        (
            Allgather(np.zeros(1, np.uint8)),
            [1.0],
            "not an object of <class 'list'>",
        ),
        (
            Allreduce(np.zeros(1, np.float32), "max"),
            None,
            "encode yields Collective(verb='allreduce', dtype='float32', op='max')",
        ),
        (
            Alltoall(np.zeros(2, np.uint8), [1, 5]),
            None,
            "an alltoall of 2 bytes on 1 ranks needs 1 splits",
        ),
        (Alltoall(np.zeros(5, np.uint8), [4]), None, "add up to those, not [4]"),
        (
            None,
            Allreduce(np.zeros(1, np.float32)),
            "encode returns Collective(verb='allreduce', dtype='float32', op='sum')",
        ),
        (None, Encoded(new_body(b"1"), 1), "encode must leave the gradient zero"),
    ],
)
def test_what_no_step_can_use_is_named(yields, returns, words, monkeypatch):
    monkeypatch.setattr(Mistaken, "yields", yields)
    monkeypatch.setattr(Mistaken, "returns", returns)
    if isinstance(yields, Allgather):
        monkeypatch.setattr(Mistaken, "says", (yields.collective,))
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        hc.simulate(Mistaken(), [[{"a": np.ones((3, 5), np.float32)}]])


@pytest.mark.parametrize(
    "says",
    [
        (),
        Collective("allgather", "uint8"),
        (Collective("allgather", "float32"),),
        (Collective("allreduce", "float32", "min"),),
        None,
    ],
)
def test_declarations_that_no_graph_can_be_built_from_are_refused(says, monkeypatch):
    monkeypatch.setattr(Mistaken, "says", says)
    with pytest.raises(ValueError, match="mistaken: `collectives` must return a tuple"):
        hc.simulate(Mistaken(), [[{"a": np.ones((3, 5), np.float32)}]])


def test_a_step_that_has_failed_cannot_be_finished():
    (exchange,) = make_ranks(hc.get_compressor("topk"), {"a": (40, 40)}, Loopback.group(1))
    exchange.submit("a", np.ones(1600, np.float32))
    exchange.tensors["a"].digest += 1
    for error, words in (
        (hc.WireError, "made for another"),
        (RuntimeError, "a: its step has failed before: submit it again"),
    ):
        with pytest.raises(error, match=words):
            exchange.finish("a", np.ones(1, np.float32))
