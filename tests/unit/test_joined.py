"""Small tensors' gathers that are one message: nothing else is another than with one for each."""

import numpy as np
import pytest
from ranks import SHAPES, copy_of, gradients, ranks_of

from horovod_compress import WireError
from horovod_compress.engine.lockstep import mean_of
from horovod_compress.protocol import wire
from horovod_compress.transport.loopback import Loopback

ALL = {**SHAPES, "y": (50, 60), "a": (20, 20)}


# More than lengths are watched for before they are padded.
STEPS = 12
# Bytes between those of y and of all others.
BETWEEN = {
    "topk:ratio=0.1": 1000,
    "dgc:ratio=0.05,values=sign": 100,
    "qsgd:min_numel=0": 2000,
    "adacomp": 500,
}


class Joining(Loopback):
    """All but y travel together. Counts messages and bytes."""

    joins_up_to = BETWEEN["topk:ratio=0.1"]

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.names, self.sent, self.lengths = [], 0, []

    def frame_length(self):
        return wire.Steady()

    def allgather(self, name, payload):
        self.names.append(name)
        self.sent += payload.nbytes
        self.lengths.append(payload.nbytes)
        return super().allgather(name, payload)


def steps(exchanges, missing=()):
    """Results of steps in which ranks submit in orders of their own, the fourth not finite, and the
    last without some tensors."""
    results, carried = [], [0] * len(exchanges)
    for step in range(STEPS):
        grads = gradients(step, len(exchanges), ALL)
        grads[-1]["x"][3] = np.nan if step == 3 else 1
        names = [name for name in ALL if step < STEPS - 1 or name not in missing]
        carriers = [
            {name: exchange.submit(name, named[name]) for name in np.roll(names, rank)}
            for rank, (exchange, named) in enumerate(zip(exchanges, grads))
        ]
        for rank, exchange in enumerate(exchanges):
            carried[rank] += sum(carrier.nbytes for carrier in carriers[rank].values())
            exchange.flush()
        for name in names:
            reduced = mean_of([named[name] for named in carriers])
            for exchange in exchanges:
                exchange.finish(name, reduced)
        results.append(grads)
    return results, [copy_of(exchange) for exchange in exchanges], carried


@pytest.mark.parametrize("missing", [(), ("w", "bias"), ("w", "x", "a")])
@pytest.mark.parametrize("spec", BETWEEN)
def test_results_and_states_are_those_of_single_messages(spec, missing, monkeypatch):
    monkeypatch.setattr(Joining, "joins_up_to", BETWEEN[spec])
    joined = ranks_of(spec, 3, ALL, Joining)
    found = steps(joined, missing)
    np.testing.assert_equal(found, steps(ranks_of(spec, 3, ALL), missing))
    stats = [exchange.stats() for exchange in joined]
    for exchange, its, carried in zip(joined, stats, found[2]):
        small = [name for name in exchange.transport.names if name != "hvdc.y"]
        assert set(small) == {"hvdc:small"} and len(small) <= STEPS
        assert its["bytes_sent"] == exchange.transport.sent
        others = sum(each.transport.sent for each in joined if each is not exchange)
        assert its["bytes_received"] == others
        of_tensors = sum(each["bytes_sent"] for each in exchange.stats_by_tensor().values())
        padding = its["bytes_sent"] + carried - of_tensors
        assert 0 <= padding <= its["bytes_sent"] / 8


def test_payloads_join_from_the_step_on_from_which_they_are_small(monkeypatch):
    spec = "dgc:ratio=0.001,min_k=1,warmup_steps=8"
    monkeypatch.setattr(Joining, "joins_up_to", 600)
    joined = ranks_of(spec, 2, ALL, Joining)
    np.testing.assert_equal(steps(joined), steps(ranks_of(spec, 2, ALL)))
    names = joined[0].transport.names
    # 25 % of its elements, and of the largest 6 %, two steps each.
    assert [names.count(f"hvdc.{name}") for name in ("w", "x", "y")] == [2, 2, 4]


def test_the_message_is_padded_as_a_whole():
    (exchange,) = ranks_of("topk:ratio=0.1", 1, ALL, Joining)
    steps([exchange])
    both = zip(exchange.transport.names, exchange.transport.lengths)
    lengths = [length for name, length in both if name == "hvdc:small"]
    assert len(set(lengths[:7])) > 1 and len(set(lengths[8:])) == 1


def test_they_are_encoded_and_leave_with_the_last_tensor_of_all():
    (exchange,) = ranks_of("topk:ratio=0.1,min_numel=0", 1, ALL, Joining)
    grads = gradients(0, 1, ALL)[0]
    for name, grad in grads.items():
        assert exchange.transport.names in ([], ["hvdc.y"])
        assert all(other.any() for key, other in grads.items() if key != "y")
        exchange.submit(name, grad)
    assert exchange.transport.names == ["hvdc.y", "hvdc:small"]
    assert not any(grad.any() for grad in grads.values())


def test_gradients_of_a_step_that_is_given_up_stay():
    kept = []
    for transport in Joining, Loopback:
        (exchange,) = ranks_of("topk:ratio=0.1", 1, ALL, transport)
        for step in range(2):
            exchange.submit("w", gradients(step, 1, ALL)[0]["w"])
        exchange.rollback()
        kept.append(copy_of(exchange))
    np.testing.assert_equal(*kept)
    assert kept[0]["w"]["residual"].any()


def test_they_leave_where_a_result_was_interrupted():
    (exchange,) = ranks_of("topk:ratio=0.1", 1, ALL, Joining)
    exchange.submit("w", gradients(0, 1, ALL)[0]["w"])
    exchange.fail_tensor("w")
    assert exchange.transport.names == ["hvdc:small"] and not exchange.succeeded


class Damaging(Joining):
    """Rank 1's message has another byte in its second frame, or is cut off."""

    cut = False

    def allgather(self, name, payload):
        if self.rank == 1:
            payload = payload[:-1] if self.cut else payload.copy()
            payload[len(payload) // 2] ^= 1
        return super().allgather(name, payload)


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_damaged_is_noticed(cut, monkeypatch):
    monkeypatch.setattr(Damaging, "cut", cut)
    names = {"w": (30, 40), "x": (40, 40)}
    exchanges = ranks_of("topk:ratio=0.1", 2, names, Damaging)
    for exchange, named in zip(exchanges, gradients(0)):
        for name in names:
            exchange.submit(name, named[name])
    words = f"payload of rank 1: {'cut off' if cut else 'its checksum'}"
    for exchange in exchanges:
        with pytest.raises(WireError, match=words):
            for name in names:
                exchange.finish(name, np.ones(1, np.float32))
        # The message is waited for once: a failure is every tensor's.
        if cut:
            with pytest.raises(WireError, match=words):
                exchange.finish("x", np.ones(1, np.float32))
