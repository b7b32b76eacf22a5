"""A saved state finds its parameters again where wrappers have come or gone, and no others."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from horovod_compress.torch_common.state_names import renamed

PLAIN = ["encoder.conv.weight", "encoder.conv.bias", "head.weight"]


def prefixed(names, prefix):
    return [prefix + name for name in names]


def inside(names, parent, part):
    return [name.replace(f"{parent}.", f"{parent}.{part}.", 1) for name in names]


WRAPPED = {
    "compiled": prefixed(PLAIN, "_orig_mod."),
    "wrapped": prefixed(PLAIN, "module."),
    "wrapped twice": prefixed(PLAIN, "module.module."),
    "compiled, then wrapped": prefixed(PLAIN, "module._orig_mod."),
    "wrapped, then compiled": prefixed(PLAIN, "_orig_mod.module."),
    "a part compiled": inside(PLAIN, "encoder", "_orig_mod"),
    "a part wrapped": inside(PLAIN, "encoder", "module"),
    "a part of a part": prefixed(inside(PLAIN, "conv", "_orig_mod"), "module."),
}


def state_of(names):
    """A state whose values are positions, so that it shows who gets whose."""
    keys = "tensors", "dense_until", "factors"
    parts = {key: {n: (key, i) for i, n in enumerate(names)} for key in keys}
    return {"rank": 0, **parts, "shards": {names[0]: [0, 1, 2, 2]}}


@pytest.mark.parametrize("saved", [PLAIN, *WRAPPED.values()], ids=["plain", *WRAPPED])
@pytest.mark.parametrize("here", [PLAIN, *WRAPPED.values()], ids=["plain", *WRAPPED])
def test_wrappers_come_and_go(saved, here):
    assert renamed(state_of(saved), here[::-1]) == state_of(here)
    assert renamed([state_of(saved)] * 2, here) == [state_of(here)] * 2


REAL = ["module.weight", "weight", "head.module.weight", "head.bias"]  # modules that users call so

OF_REAL = [prefixed(REAL, p) for p in ("", "module.", "_orig_mod.", "module._orig_mod.")]


@pytest.mark.parametrize("here", OF_REAL)
@pytest.mark.parametrize("saved", OF_REAL)
def test_a_module_of_the_users_is_no_wrapper(saved, here):
    assert renamed(state_of(saved), here) == state_of(here)


@pytest.mark.parametrize(
    "saved, here, others",
    [
        (["module.weight", "head.weight"], ["weight", "head.weight"], ()),
        (["module.weight", "weight"], ["weight", "bias"], ()),
        (["module.weight"], ["weight", "bias"], ()),
        # One was trained then, and the other is now.
        (["module.weight"], ["weight"], ["module.weight"]),
        (["module.weight"], ["_orig_mod.weight"], ["_orig_mod.module.weight"]),
        # A parameter of that name is no module.
        (["scale.module"], ["scale"], ()),
    ],
)
def test_what_is_not_certain_stays(saved, here, others):
    assert renamed(state_of(saved), here, others) == state_of(saved)


@pytest.mark.parametrize("state", [None, 5, {}, {"tensors": 5}, {"tensors": {1: {}}}, [None], "x"])
def test_what_is_no_state_stays(state):
    assert renamed(state, PLAIN) == state
