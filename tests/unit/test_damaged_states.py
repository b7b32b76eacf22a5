"""States that an accident has changed are refused at once, by a line that says what is wrong."""

import copy
import tracemalloc

import numpy as np
import pytest
from ranks import gradients

from horovod_compress.compressors import get_compressor
from horovod_compress.engine.lockstep import make_ranks, run_step
from horovod_compress.protocol.handshake import shown
from horovod_compress.transport.loopback import Loopback

SHAPES = {"w": (30, 40), "x": (40, 40), "bias": (40,)}
HUGE = 10**12


def trained(spec="dgc:ratio=0.05,min_numel=100", size=2, local_size=1):
    exchanges = make_ranks(
        get_compressor(spec), SHAPES, Loopback.group(size), local_size=local_size
    )
    for seed in range(2):
        run_step(exchanges, gradients(seed, size, SHAPES))
    return exchanges


def states_of(exchanges):
    return [copy.deepcopy(exchange.state_dict()) for exchange in exchanges]


def assert_refused(exchange, state, *words):
    """The message is a line, nothing changes, and nothing as large as the state says is made."""
    before = copy.deepcopy(exchange.state_dict())
    tracemalloc.start()
    with pytest.raises(ValueError) as caught:
        exchange.load_state_dict(state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.isprintable() and len(message) < 1200, message
    assert peak < 1e6, peak
    after = exchange.state_dict()
    assert after["step"] == before["step"]
    for name, arrays in before["tensors"].items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(after["tensors"][name][key], array)


BAD = (np.nan, np.inf, -np.inf, 2.0**110, -(2.0**120))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "spec, key",
    [
        ("dgc:ratio=0.05,min_numel=100", "u"),
        ("dgc:ratio=0.05,min_numel=100", "v"),
        ("variance:min_numel=0", "v"),
        ("powersgd:rank=2,min_numel=0", "q"),
        ("efsignsgd:min_numel=0", "residual"),
    ],
)
def test_what_no_step_could_go_on_from_is_refused(spec, key, value):
    exchanges = trained(spec)
    states = states_of(exchanges)
    states[1]["tensors"]["x"][key].reshape(-1)[7] = value
    assert_refused(exchanges[1], states[1], f"x.{key} has elements that are {value:.3g}")
    # All ranks refuse the list alike, and say whose it is.
    for exchange in exchanges:
        assert_refused(exchange, states, f"x.{key} of rank 1 has elements")
    assert_refused(exchanges[0], {**states[1], "rank": None}, f"x.{key} has elements")


def test_the_largest_residual_that_kernels_keep_is_loaded():
    exchange = trained()[0]
    state = copy.deepcopy(exchange.state_dict())
    state["tensors"]["x"]["v"][3] = np.nextafter(np.float32(2.0**110), np.float32(0))
    exchange.load_state_dict(state)
    np.testing.assert_array_equal(exchange.arrays()["x"]["v"], state["tensors"]["x"]["v"])


@pytest.mark.parametrize("size", (10**7, HUGE, 3))
def test_a_size_that_cannot_be(size):
    exchanges = trained()
    states = [{**state, "size": size} for state in states_of(exchanges)]
    assert_refused(exchanges[0], states, "the state of rank 2", "is missing", f"all {size} ranks")
    assert_refused(exchanges[0], states[0], f"size is {size} in it and 2 here")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"size": 1}, "rank is 1 in it and below its size of 1 here"),
        ({"size": "2"}, "size is '2' in it and a whole number here"),
        ({"size": 2.5}, "size is 2.5 in it"),
        ({"seed": "0"}, "seed is '0' in it and 0 here"),
        ({"seed": np.ones(3)}, "seed is array([1., 1., 1.]) in it and 0 here"),
        ({"id": ["dgc"]}, "id is ['dgc'] in it and 'dgc' here"),
        ({"id": "dgc\x1b[2J\n"}, r"id is 'dgc\x1b[2J\n' in it and 'dgc' here"),
        ({"id": "x" * 10**6}, "xxx...xxx"),
        ({"step": list(range(10**5))}, "step is [0, 1, 2,"),
        ({"dense_until": [1] * 10**5}, "dense_until is [1, 1,"),
        ({"factors": {"w": 0.0}}, "factors is {'w': 0.0} in it and numbers from above 0 to 1"),
        ({"shards": list(range(10**5))}, "shards is [0, 1, 2,"),
    ],
)
def test_values_are_shown_in_short_and_by_their_types(change, words):
    exchanges = trained()
    assert_refused(exchanges[1], {**states_of(exchanges)[1], **change}, words)


def test_values_of_one_type_are_shown_plainly():
    assert shown("topk", "dgc") == ["topk", "dgc"]
    assert shown("2", 2) == ["'2'", "2"]
    assert shown(True, 1.0) == ["True", "1.0"]


@pytest.mark.parametrize(
    "shard, words",
    [
        ([0, 800, HUGE, 2], "shards.x is"),
        ([0, 800, 1600, 1], "shards.x is"),
        ([800, 1600, 1600, 2], "which are not 2 parts of 1600 elements"),
        ([0, 799, 1600, 2], "tensors.x.residual is float32 of (1600,)"),
        ([0, 800, 1600, HUGE], "shards.x is [0, 800, 1600"),
        ([0, 800, 700, 2], "shards.x is [0, 800, 700, 2] in it and first, last"),
        ([0, -800, 1600, 2], "shards.x is [0, -800"),
        ([0, 800], "shards.x is [0, 800] in it"),
        ([0, 800.0, 1600, 2], "shards.x is [0, 800.0"),
        ("abcd", "shards.x is 'abcd' in it"),
        (None, "shards.x is None in it"),
        (HUGE, "shards.x is 1000000000000 in it"),
    ],
)
@pytest.mark.parametrize("local_size", (1, 2))
def test_parts_of_tensors_that_cannot_be(shard, words, local_size):
    states = states_of(trained("topk:hosts=true,min_numel=0", 4, 2))
    assert states[2]["shards"]["x"] == [0, 800, 1600, 2]
    exchange = trained("topk:hosts=true,min_numel=0", 4, local_size)[1]
    exchange.load_state_dict(states)
    states[2] = {**states[2], "shards": {**states[2]["shards"], "x": shard}}
    assert_refused(exchange, states, words)
    with pytest.raises(ValueError):
        exchange.load_state_dict([{**s, "shards": {**s["shards"], "x": shard}} for s in states])
