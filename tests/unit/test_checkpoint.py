"""States for another number of ranks: for every id of available(), nothing of what ranks have not
sent yet is lost."""

import copy
import itertools

import numpy as np
import pytest
from battery_facts import SHAPES, copies, over, quiet, spec_of, steps_of, variants
from ranks import assert_same, copy_of, on_all_ranks, ranks_of, rescale

from horovod_compress.compressors.state import SHARED
from horovod_compress.engine import checkpoint
from horovod_compress.engine.lockstep import run_step
from horovod_compress.protocol.handshake import MismatchError

pytestmark = quiet


def trained(spec, size, steps=5, seed=0):
    """Exchanges after some steps."""
    exchanges = ranks_of(spec, size, SHAPES)
    for ranks in steps_of(seed, steps, size, spread=False):
        run_step(exchanges, ranks)
    return exchanges


def means(exchanges):
    """{(tensor, array): mean over ranks}, float64."""
    arrays = [copy_of(exchange) for exchange in exchanges]
    return {
        (n, k): np.mean([each[n][k] for each in arrays], axis=0, dtype=np.float64)
        for n in arrays[0]
        for k in arrays[0][n]
    }


def assert_means_are(exchanges, expected):
    for key, mean in means(exchanges).items():
        np.testing.assert_allclose(
            mean,
            expected[key],
            rtol=1e-6,
            atol=1e-6 * np.abs(expected[key]).max(initial=0),
            err_msg=str(key),
        )


def portable(exchanges):
    return on_all_ranks(
        lambda exchange, transport: checkpoint.portable(exchange.state_dict(), transport, "state"),
        exchanges,
    )


@over(variants)
def test_the_mean_is_kept_at_any_number_of_ranks(id, options):
    old = trained(spec_of(id, options), 3)
    expected, states = means(old), [exchange.state_dict() for exchange in old]
    for size, given in itertools.product((1, 2, 5), (states, states[::-1], portable(old)[0])):
        new = trained(spec_of(id, options), size, 2, seed=1)
        for exchange in new:
            exchange.load_state_dict(given)
        assert_means_are(new, expected)
        assert new[0].state_dict()["step"] == 5
        for ranks in steps_of(2, 3, size):
            run_step(new, ranks)
    for name, arrays in states[0]["tensors"].items():
        for key, array in arrays.items():
            if old[0].tensors[name].compressor.roles[key] is SHARED:
                new[0].load_state_dict(states)
                assert new[0].arrays()[name][key].tobytes() == array.tobytes()


@over(variants)
def test_all_ranks_own_states_continue_bit_for_bit(id, options):
    old, new = trained(spec_of(id, options), 3), trained(spec_of(id, options), 3, 1, seed=1)
    states = [exchange.state_dict() for exchange in old]
    for exchange in new:
        exchange.load_state_dict([states[2], states[0], states[1]])
    for ranks in steps_of(2, 3, 3):
        results = run_step(old, copies(ranks)), run_step(new, copies(ranks))
        for before, after in zip(*results):
            for name in before:
                np.testing.assert_array_equal(before[name], after[name])
    for before, after in zip(old, new):
        assert_same(copy_of(before), copy_of(after))


def test_a_portable_state_is_the_same_on_all_ranks():
    exchanges = trained("dgc:ratio=0.05,min_numel=100", 3)
    expected, states = means(exchanges), portable(exchanges)
    assert [state["rank"] for state in states] == [None] * 3
    for state in states:
        for (name, key), mean in expected.items():
            np.testing.assert_array_equal(
                state["tensors"][name][key], states[0]["tensors"][name][key]
            )
            np.testing.assert_allclose(state["tensors"][name][key], mean, rtol=1e-6, atol=1e-7)


def test_loss_scales_are_left_out():
    exchanges = ranks_of("variance:min_numel=0", 2, SHAPES)
    for exchange, unit in zip(exchanges, (1.0, 1024.0)):
        rescale([exchange], unit)
    grads = steps_of(0, 1, 2, spread=False)[0]
    run_step(
        exchanges,
        [
            {n: g * np.float32(1024**rank) for n, g in named.items()}
            for rank, named in enumerate(grads)
        ],
    )
    (state, _), states = portable(exchanges), [exchange.state_dict() for exchange in exchanges]
    for name, arrays in state["tensors"].items():
        for key, array in arrays.items():
            np.testing.assert_allclose(
                array,
                np.mean([each["tensors"][name][key] for each in states], axis=0),
                rtol=1e-5,
                atol=1e-7,
            )


def test_a_portable_state_of_different_steps_is_refused():
    exchanges = trained("topk:min_numel=0", 2)
    exchanges[1].load_state_dict({**exchanges[1].state_dict(), "step": 7})
    with pytest.raises(
        MismatchError, match="rank 1 differs from rank 0 in step: 7 on rank 1, 5 on rank 0"
    ):
        portable(exchanges)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s[:2], r"state of rank 2 is missing: load the list of all 3 ranks' states"),
        (lambda s: [s[1]], r"state of rank 0, 2 is missing"),
        (lambda s: [], r"state of rank 0, 1 is missing: load the list of all 2 ranks"),
        (lambda s: [s[0], s[1], s[1]], r"two of the 3 states are of rank 1"),
        (
            lambda s: [s[0], s[1], {**s[2], "step": 4}],
            r"rank 0 and rank 2 do not belong together: step is 5 in the first and 4 in the second",
        ),
        (
            lambda s: [s[0], {**s[1], "id": "dgc"}, s[2]],
            r"id is topk in the first and dgc in the second",
        ),
        (
            lambda s: [s[0], {**s[1], "size": 4}, s[2]],
            r"size is 3 in the first and 4 in the second",
        ),
        (
            lambda s: [s[0], {**s[1], "tensors": {}}, s[2]],
            r"tensors\.w is there in the first and missing in the second",
        ),
        (
            lambda s: [s[0], {**s[1], "rank": None}, s[2]],
            r"saved with portable=True holds all ranks: load it by itself",
        ),
        (lambda s: [s[0], s[1], {}], r"not a state_dict"),
        (lambda s: {**s[0], "rank": "0"}, r"rank is '0' in it and a whole number here"),
        (lambda s: {**s[0], "rank": None, "seed": 5}, r"seed is 5 in it and 0 here"),
        (lambda s: {**s[0], "rank": None, "tensors": {}}, r"w is missing in it"),
        (
            lambda s: s[0],
            r"size is 3 in it and 2 here.*list of all ranks' states, or one that was saved with "
            r"portable=True",
        ),
    ],
)
def test_states_that_are_not_all_ranks_are_refused_and_nothing_changes(change, words):
    states = [exchange.state_dict() for exchange in trained("topk:min_numel=0", 3)]
    exchange = trained("topk:min_numel=0", 2, 2, seed=1)[0]
    before = copy.deepcopy(exchange.state_dict())
    with pytest.raises(ValueError, match=words):
        exchange.load_state_dict(change(states))
    after = exchange.state_dict()
    assert before["step"] == after["step"]
    assert_same(before["tensors"], after["tensors"])


def test_a_copy_uses_the_memory_of_the_last_one():
    exchange = trained("adacomp:min_numel=0", 2)[0]
    first = exchange.state_dict()
    memory = first["tensors"]["w"]["residual"]
    memory.fill(7)
    second = exchange.state_dict(into=first)
    assert second["tensors"]["w"]["residual"] is memory
    assert_same(second["tensors"], exchange.state_dict()["tensors"])
