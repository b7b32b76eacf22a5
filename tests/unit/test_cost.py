"""The cost model: what it must obey whatever the figures are, and cases that can be worked out by
hand."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from horovod_compress.tools.cost import (
    COLLECTIVES,
    FUSION,
    Load,
    Network,
    added_seconds,
    break_even,
)

seconds = st.floats(0, 10)
sizes = st.floats(0, 1e10)
loads = st.builds(
    Load,
    exchanged=st.dictionaries(st.sampled_from(COLLECTIVES), sizes, min_size=1),
    operations=st.dictionaries(st.sampled_from(COLLECTIVES), st.floats(1, 1e4), min_size=1),
    rounds=st.integers(0, 3),
    hides=st.booleans(),
    last=st.floats(0, 1),
    encode=seconds,
    decode=seconds,
)
ranks = st.integers(2, 4096)
rates = st.floats(1e6, 1e12)
latencies = st.floats(0, 0.1)
more = st.floats(1, 100)
EXACT = 1 + 1e-9  # sums are rounded

NETWORK = Network(4, 1e-3, 1e-4, dict.fromkeys(COLLECTIVES, 1e-8))
PAIR = Network(2, 1.2e-3, 1e-4, dict.fromkeys(COLLECTIVES, 1e-8))
BOTH = {"allgather uint8": 1.0, "allreduce float32": 1.0}
GATHERED = Load({"allgather uint8": 1e6, "allreduce float32": 4.0}, BOTH, 0, True, 0.25, 0.01, 0.02)


def link(ranks, rate, latency):
    return Network.of_link(rate, latency).among(ranks, rings=True)


def test_by_hand():
    transfer = (1e6 * 3 + 4.0 * 1.5) * 1e-8
    exchange = transfer + 2 * 1e-3 + 2 * 1e-4
    assert added_seconds(GATHERED, NETWORK) == pytest.approx(0.01 + exchange + 0.02)
    assert added_seconds(GATHERED, NETWORK, 0.005) == pytest.approx(0.01 + exchange - 0.005 + 0.02)
    # What the last gradient brings.
    assert added_seconds(GATHERED, NETWORK, 1.0) == pytest.approx(0.01 + 1e-3 + transfer / 4 + 0.02)
    assert added_seconds(dataclasses.replace(GATHERED, hides=False), NETWORK, 1.0) == added_seconds(
        GATHERED, NETWORK
    )
    rounds = dataclasses.replace(GATHERED, rounds=2)
    assert added_seconds(rounds, NETWORK) == pytest.approx(added_seconds(GATHERED, NETWORK) + 2e-3)
    assert (GATHERED.sent, GATHERED.received(4)) == (1e6 + 4, 3e6 + 4)


def test_what_horovod_cannot_fuse_takes_more_messages():
    free = Network(2, 1.0, 0.0, dict.fromkeys(COLLECTIVES, 0.0))
    found = [
        added_seconds(
            Load({"allreduce float32": nbytes}, {"allreduce float32": 1}, 0, True, 0, 0, 0), free
        )
        for nbytes in (1, FUSION, FUSION + 1, 3 * FUSION)
    ]
    assert found == [1, 1, 2, 3]


@examples(100)
@given(loads, ranks, rates, latencies, seconds)
def test_a_step_takes_its_work_at_least_and_its_exchange_at_most(
    load, ranks, rate, latency, backward
):
    network = link(ranks, rate, latency)
    added = added_seconds(load, network, backward)
    assert load.encode + load.decode <= added * EXACT <= added_seconds(load, network) * EXACT**2


@examples(100)
@given(loads, ranks, rates, latencies, seconds, more)
def test_more_of_anything_takes_no_less(load, ranks, rate, latency, backward, factor):
    here = link(ranks, rate, latency)
    before = added_seconds(load, here, backward)
    larger = dataclasses.replace(
        load, exchanged={kind: factor * nbytes for kind, nbytes in load.exchanged.items()}
    )
    assert before <= added_seconds(larger, here, backward) * EXACT
    assert before <= added_seconds(load, link(int(ranks * factor), rate, latency), backward) * EXACT
    assert before <= added_seconds(load, link(ranks, rate / factor, latency), backward) * EXACT
    assert before <= added_seconds(load, link(ranks, rate, latency * factor), backward) * EXACT
    assert (
        before
        <= added_seconds(
            dataclasses.replace(load, rounds=load.rounds + 1, hides=False), here, backward
        )
        * EXACT
    )
    assert before <= added_seconds(load.times(factor, factor), here, backward) * EXACT


@examples(100)
@given(st.integers(2, 10_000), st.integers(2, 10_000), st.booleans())
def test_more_ranks_take_more_messages(first, second, rings):
    few, many = sorted((first, second))
    here, there = (PAIR.among(ranks, rings) for ranks in (few, many))
    assert here.latency <= there.latency and there.ranks == many
    waits = [network.latency - 1e-3 for network in (here, there)]
    if rings:
        assert waits == pytest.approx([0.2e-3 * (few - 1), 0.2e-3 * (many - 1)])
    else:
        assert waits == pytest.approx(
            [0.2e-3 * math.ceil(math.log2(ranks)) for ranks in (few, many)]
        )


@examples(100)
@given(loads, loads, ranks, rates)
def test_the_break_even_is_where_both_take_as_long(load, dense, ranks, rate):
    def network(factor):
        return link(ranks, rate * factor, 1e-4)

    def ahead(factor):
        """By how many seconds the compressed step is shorter."""
        return added_seconds(dense, network(factor)) - added_seconds(load, network(factor))

    factor = break_even(load, dense, network)
    if factor is None:
        assert ahead(1e6) > 0
    elif factor == 0:
        assert ahead(1e-6) <= 0
    else:
        assert ahead(factor) <= 0 < ahead(factor / 1.01)


def test_a_network_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"network": dataclasses.asdict(NETWORK), "good": True}))
    assert Network.read(str(path)) == NETWORK
