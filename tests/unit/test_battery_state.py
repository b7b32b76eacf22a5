"""For every id of available(): runs repeat exactly, with seeds of their own, and go on from a state
bit for bit."""

import random
import sys

import numpy as np
import pytest
from battery_facts import (
    FACTS,
    SHAPES,
    bytes_of,
    copies,
    over,
    quiet,
    shaped,
    spec_of,
    steps_of,
    variants,
    with_seed,
)
from ranks import copy_of, ranks_of

import horovod_compress as hc
from horovod_compress.engine.lockstep import run_step

pytestmark = quiet


# -- seeds


@over(variants)
def test_runs_repeat_exactly_and_seeds_matter_where_something_is_drawn(id, options):
    grads = shaped(steps_of(0, 4, 3))
    first, again, other = (
        hc.simulate(with_seed(spec_of(id, options), seed), grads) for seed in (1, 1, 2)
    )
    assert bytes_of(first.mean) == bytes_of(again.mean) and first.bytes_sent == again.bytes_sent
    if FACTS[id].drawn:
        assert bytes_of(first.mean) != bytes_of(other.mean)
    # Those two sample places, to find a threshold.
    if not FACTS[id].drawn and id not in ("dgc", "topk"):
        assert bytes_of(first.mean) == bytes_of(other.mean)


@over(variants)
def test_global_generators_are_left_alone(id, options):
    grads = shaped(steps_of(0, 3, 2))
    torch = sys.modules.get("torch")
    states = []
    for _ in range(2):
        states.append(
            (
                random.getstate(),
                str(np.random.get_state()),
                torch and torch.get_rng_state().tolist(),
            )
        )
        first = bytes_of(hc.simulate(spec_of(id, options), grads).mean)
    assert states[0] == states[1]
    random.seed(99)
    np.random.seed(99)
    assert bytes_of(hc.simulate(spec_of(id, options), grads).mean) == first


# -- state


@over(variants)
def test_the_state_is_what_the_compressor_says(id, options):
    """Shared arrays are alike on all ranks, after every step; local ones differ, but where all was
    sent."""
    exchanges = ranks_of(spec_of(id, options), 3, SHAPES)
    for ranks in steps_of(0, 4, 3, spread=False):
        run_step(exchanges, ranks)
        kept = [
            {(n, k): a.tobytes() for n, arrays in copy_of(ex).items() for k, a in arrays.items()}
            for ex in exchanges
        ]
        for name, key in kept[0]:
            role = exchanges[0].tensors[name].compressor.roles[key].value
            same = len({state[name, key] for state in kept}) == 1
            assert role in ("local", "shared") and (same or role == "local"), (name, key)
            assert not same or role == "shared" or not any(kept[0][name, key]), (name, key)


@over(variants)
def test_a_loaded_state_continues_bit_for_bit(id, options):
    steps = steps_of(0, 9, 3)
    exchanges = ranks_of(spec_of(id, options), 3, SHAPES)
    for ranks in steps[:5]:
        run_step(exchanges, copies(ranks))
    saved = [ex.state_dict() for ex in exchanges]
    frozen = [
        {n: {k: a.tobytes() for k, a in arrays.items()} for n, arrays in state["tensors"].items()}
        for state in saved
    ]
    expected = [bytes_of(run_step(exchanges, copies(ranks))) for ranks in steps[5:]]
    again = ranks_of(spec_of(id, options), 3, SHAPES)
    run_step(again, copies(steps[0]))
    for ex, state in zip(again, saved):
        ex.load_state_dict(state)
    assert [bytes_of(run_step(again, copies(ranks))) for ranks in steps[5:]] == expected
    assert frozen == [
        {n: {k: a.tobytes() for k, a in arrays.items()} for n, arrays in state["tensors"].items()}
        for state in saved
    ]
    for ex, other in zip(exchanges, again):
        for name, arrays in copy_of(ex).items():
            for key, array in arrays.items():
                assert array.tobytes() == other.arrays()[name][key].tobytes()


@over(lambda facts: facts.variants[:1])
def test_a_state_of_another_seed_or_rank_is_refused(id, options):
    spec = spec_of(id, options)
    own, other_rank = ranks_of(spec, 2, SHAPES)
    with pytest.raises(ValueError, match="rank is 1 in it and 0 here"):
        own.load_state_dict(other_rank.state_dict())
    if "seed" in hc.available()[id]["options"]:
        with pytest.raises(ValueError, match="seed is 5 in it and 0 here"):
            own.load_state_dict(ranks_of(with_seed(spec, 5), 2, SHAPES)[0].state_dict())
