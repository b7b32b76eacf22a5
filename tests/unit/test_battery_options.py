"""For every id of available(): what specs take and refuse, and what available() says."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from battery_facts import FACTS, quiet

import horovod_compress as hc
from horovod_compress.compressors import REGISTRY
from horovod_compress.compressors.options import (
    Ascending,
    Auto,
    Count,
    Flag,
    Number,
    OneOf,
    Patterns,
    Schedule,
    ZeroOrCount,
)

pytestmark = quiet


def test_there_are_facts_about_every_id():
    assert set(FACTS) == set(hc.available())


def fields():
    return [(id, field) for id, cls in REGISTRY.items() for field in dataclasses.fields(cls)]


over_options = pytest.mark.parametrize(
    "id, field", fields(), ids=[f"{id}.{field.name}" for id, field in fields()]
)


def wrong_values(kind):
    """Values of the wrong type or out of range, for a kind of option."""
    if isinstance(kind, Auto):
        return [v for v in wrong_values(kind.kind) if v != "auto"]
    none = [] if getattr(kind, "optional", False) else [None]
    if isinstance(kind, (Number, Count)):
        below = [kind.low - 1] + ([kind.low] if getattr(kind, "low_open", False) else [])
        above = [2 * kind.high + 1] if kind.high < math.inf else []
        halves = [1.5] if isinstance(kind, Count) else []
        return [
            *below,
            *above,
            *halves,
            *none,
            "1",
            "many",
            True,
            math.nan,
            math.inf,
            -math.inf,
            1j,
            [1],
            {},
        ]
    if isinstance(kind, Flag):
        return [0, 1, "true", 0.0, [], *none]
    if isinstance(kind, OneOf):
        return ["", "pigeon", 5, True, [], kind.words[0].upper(), *none]
    if isinstance(kind, Patterns):
        return [5, [1], {"a": 1}, 0.5, *none]
    if isinstance(kind, Ascending):
        return [
            5,
            (),
            (4,),
            (6, 2),
            (4, 4),
            (0, 4),
            (4, 17),
            tuple(range(1, 10)),
            (2.5, 6),
            "2+6",
            (True, 4),
            *none,
        ]
    if isinstance(kind, Schedule):
        pairs = [
            ((1, 0.5),),
            ((0, 0.5), (0, 0.1)),
            ((0, 2),),
            ((0, 0),),
            ((0.5, 0.1),),
            ((0, 0.1, 3),),
            ((0,),),
        ]
        return [5, "0/1", *pairs, *none]
    raise AssertionError(f"say what is wrong for {kind}")


WRONG_TEXTS = {
    Number: ["", "many", "1e", "nan", "inf"],
    Count: ["", "many", "1.5", "1e3"],
    ZeroOrCount: ["", "many", "1", "3"],
    Flag: ["", "yes", "1"],
    OneOf: ["", "pigeon"],
    Ascending: ["", "5", "6+2", "a+b"],
    Schedule: ["5", "0/2", "a/b", "1/0.5"],
    Patterns: [],
}


@over_options
def test_bad_options_name_the_problem_and_what_is_valid(id, field):
    kind = field.metadata["kind"]
    for value in wrong_values(kind):
        with pytest.raises(ValueError) as error:
            hc.get_compressor({"id": id, field.name: value})
        assert f"{id}: {field.name} must be {kind}, not {value!r}" == str(error.value)
    for text in (
        ["automatic", "0", *WRONG_TEXTS[type(kind.kind)]]
        if isinstance(kind, Auto)
        else WRONG_TEXTS[type(kind)]
    ):
        with pytest.raises(ValueError) as error:
            hc.get_compressor(f"{id}:{field.name}={text}")
        assert id in str(error.value) and field.name in str(error.value)
    with pytest.raises(ValueError, match="twice"):
        text = text_of(kind, valid_values(kind)[-1])
        hc.get_compressor(f"{id}:{field.name}={text},{field.name}={text}")


EXTREMES = {
    Number: [1e300, 1e-300, 1e39, 1e-46, 10**400, -(10**400)],
    Count: [2**31, 2**63, 2**64 - 1, 2**64, 10**400],
}
LENGTHS = ("bin_length", "bucket_size")


@over_options
def test_extreme_numbers_are_refused_or_work(id, field):
    """What a spec takes does not fail later."""
    kind = field.metadata["kind"]
    for value in EXTREMES.get(type(kind), []) if field.name not in LENGTHS else []:
        needs = {"ratio": 0.5} if field.name in ("unbiased", "of") else {}
        try:
            compressor = hc.get_compressor({"id": id, "min_numel": 0, **needs, field.name: value})
        except ValueError as error:
            assert f"{field.name} must be {kind}" in str(error)
            continue
        run = hc.simulate(compressor, [[{"w": np.ones((5, 5))}] * 2] * 2)
        assert all(np.isfinite(mean["w"]).all() for mean in run.mean), value


@pytest.mark.parametrize(
    "option", ["adacomp:min_numel=0,bin_length", "qsgd:min_numel=0,bucket_size"]
)
def test_lengths_far_beyond_the_tensor_are_refused_or_work(option):
    """In a process of its own, that may crash."""
    code = (
        "import horovod_compress as hc, numpy as np\n"
        f"for length in ({10**30}, {2**64}, {2**64 - 1}, {2**63}, {2**31}):\n"
        f"    try: compressor = hc.get_compressor('{option}=%d' % length)\n"
        "    except ValueError: continue\n"
        "    assert (hc.simulate(compressor, [[{'w': np.ones((5, 5))}] * 2]).mean[0]['w'] == "
        "1).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("id", hc.available())
def test_unknown_ids_and_options_name_the_valid_ones(id):
    with pytest.raises(ValueError) as error:
        hc.get_compressor(f"{id}x")
    assert all(name in str(error.value) for name in hc.available())
    for spec in (f"{id}:bogus=1", {"id": id, "bogus": 1}):
        with pytest.raises(ValueError, match=f"{id} has no option 'bogus'") as error:
            hc.get_compressor(spec)
        assert all(name in str(error.value) for name in hc.available()[id]["options"])
    with pytest.raises(ValueError, match="option=value"):
        hc.get_compressor(f"{id}:bogus")


def valid_values(kind):
    """Values other than the default, for most."""
    if isinstance(kind, Auto):
        return ["auto", *valid_values(kind.kind)]
    none = [None] if getattr(kind, "optional", False) else []
    if isinstance(kind, Number):
        high = min(kind.high, kind.low + 1)
        return [
            high,
            kind.low + 0.7 * (high - kind.low),
            (kind.low + high) / 3 + 1e-9,
            np.float32(high),
            *none,
        ]
    if isinstance(kind, Count):
        return [kind.low, min(kind.high, kind.low + 3), np.int64(kind.low + 1), *none]
    if isinstance(kind, Flag):
        return [True, False, *none]
    if isinstance(kind, OneOf):
        return list(kind.words)
    if isinstance(kind, Patterns):
        return [("a*", "b.c"), (), ["x"], "one"]
    if isinstance(kind, Ascending):
        return [(1, 16), (3, 5, 7), [4, 8]]
    if isinstance(kind, Schedule):
        return [(), ((0, 0.25), (10, 0.01)), [[0, 1]]]
    raise AssertionError(f"say what is valid for {kind}")


def text_of(kind, value):
    """A value as it stands in a spec."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(kind, Schedule):
        return "+".join(f"{step}/{ratio}" for step, ratio in value)
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


# What an option needs besides.
NEEDS = {"unbiased": {"ratio": 0.5}, "of": {"ratio": 0.5}, "nesterov": {"momentum": 0.5}}


@over_options
def test_specs_dicts_reprs_and_configs_are_one(id, field):
    kind, needs = field.metadata["kind"], NEEDS.get(field.name, {})
    needs = {name: value for name, value in needs.items() if name in hc.available()[id]["options"]}
    for value in valid_values(kind):
        text = ",".join(f"{name}={text_of(None, v)}" for name, v in needs.items())
        # An empty tuple is the default of what has it, and not to be said.
        if value or not isinstance(value, tuple):
            text += f",{field.name}={text_of(kind, value)}"
        compressor = hc.get_compressor({"id": id, field.name: value, **needs})
        cls = type(compressor)
        assert (
            compressor == cls(**{field.name: value}, **needs) == hc.get_compressor(f"{id}:{text}")
        )
        assert hc.get_compressor(json.loads(json.dumps(compressor.config))) == compressor
        assert eval(repr(compressor), {cls.__name__: cls}) == compressor
        assert hash(compressor) == hash(hc.get_compressor(compressor))
        assert set(compressor.config) == {"id", *hc.available()[id]["options"]}


@pytest.mark.parametrize("id", hc.available())
def test_what_available_says_is_what_there_is(id):
    about = hc.available()[id]
    compressor = hc.get_compressor(id)
    assert about["collective"] in ("allreduce", "allgather") and about["paper"]
    assert {name: option["default"] for name, option in about["options"].items()} == {
        name: value for name, value in compressor.config.items() if name != "id"
    }
    assert all(option["doc"] and option["values"] for option in about["options"].values())
    assert (
        len({cls.traits.number for cls in REGISTRY.values()}) == len(REGISTRY)
        and 0 <= compressor.traits.number < 256
    )
