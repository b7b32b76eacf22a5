"""Changing the compressor while training loses nothing: means of gradients are means of results and
of what is owed, whatever comes after what."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import discardable, on_all_ranks, rescale
from tiers import examples

from horovod_compress import MismatchError, get_compressor
from horovod_compress.engine import checkpoint
from horovod_compress.engine.debt import DEBT, debt_of
from horovod_compress.engine.lockstep import make_ranks, run_step
from horovod_compress.transport.loopback import Loopback

SHAPES = {"matrix": (40, 50), "small": (7,)}
EXACT = (
    # Those that drop nothing: what they do not send they keep.
    "none",
    "topk:ratio=0.02",
    "dgc:ratio=0.05,momentum=0",
    "adacomp",
    "strom:tau=0.5",
    "powersgd:min_rate=1",
    "efsignsgd",
    "onebit",
    "variance:error_feedback=true",
    "topk:ratio=0.1,min_numel=0",
    "adacomp:min_numel=0",
    "dgc:ratio=0.5,momentum=0,min_numel=0",
)


def gradients(rng, size, shapes=SHAPES):
    return [
        {
            name: rng.standard_normal(int(np.prod(shape)), np.float32)
            for name, shape in shapes.items()
        }
        for _ in range(size)
    ]


def ranks(spec, size, shapes=SHAPES, **options):
    return make_ranks(get_compressor(spec), shapes, Loopback.group(size), **options)


def switch(exchanges, spec, gain=1.0, shapes=SHAPES):
    compressor = get_compressor(spec)
    for exchange in exchanges:
        exchange.switch(
            compressor,
            {name: (shape, compressor) for name, shape in shapes.items()},
            dict.fromkeys(shapes, gain),
        )


def owed(exchanges, name):
    """The mean over ranks of what results are still to bring."""
    total = []
    for exchange in exchanges:
        exchange.arrays()
        tensor = exchange.tensors[name]
        parts = (debt_of(tensor.compressor, tensor.state), tensor.state.arrays.get(DEBT))
        total.append(
            sum((part for part in parts if part is not None), np.zeros(tensor.numel, np.float32))
        )
    return np.mean(total, axis=0, dtype=np.float64)


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(EXACT),
            st.integers(0, 3),
            st.sampled_from(("", "nan", "save", "rescale")),
        ),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 3),
    st.integers(0, 100),
)
def test_nothing_is_lost_over_any_sequence_of_switches(sequence, size, seed):
    rng, unit = np.random.default_rng(seed), 1.0
    exchanges = discardable(ranks(sequence[0][0], size))
    come, brought = (
        {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()} for _ in range(2)
    )
    for spec, steps, event in sequence:
        switch(exchanges, spec)
        if event == "rescale":
            unit = 1024.0 / unit
            rescale(exchanges, unit)
        if event == "save":
            states = [exchange.state_dict() for exchange in exchanges]
            exchanges = discardable(ranks(spec, size))
            for exchange, state in zip(exchanges, states):
                exchange.load_state_dict(state)
            rescale(exchanges, unit)
        for step in range(steps):
            grads = gradients(rng, size)
            if event == "nan" and step == 0:
                grads[-1]["matrix"][3] = np.nan  # such a step is forgotten
                run_step(exchanges, grads)
                continue
            for name in SHAPES:
                come[name] += np.mean([named[name] for named in grads], axis=0, dtype=np.float64)
            results = run_step(
                exchanges,
                [
                    {name: np.float32(unit) * array for name, array in named.items()}
                    for named in grads
                ],
            )
            for name in SHAPES:
                brought[name] += results[0][name].astype(np.float64) / unit
    for name in SHAPES:
        total = brought[name] + owed(exchanges, name)
        assert np.abs(total - come[name]).max() <= 1e-4 * (1 + np.abs(come[name]).max()), name


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_hosts_bring_once_what_an_algorithm_without_a_residual_finds(loss_scale):
    rng, shapes = np.random.default_rng(0), {"matrix": (40, 50)}
    exchanges = ranks("topk:ratio=0.01", 4, shapes, local_size=2)
    rescale(exchanges, loss_scale)
    missing = np.zeros(2000)
    for spec in ("topk:ratio=0.01,hosts=true", "qsgd:bits=15,hosts=true"):
        switch(exchanges, spec, shapes=shapes)
        for _ in range(3):
            grads = gradients(rng, 4, shapes)
            missing += np.mean([named["matrix"] for named in grads], axis=0)
            for named in grads:
                named["matrix"] *= np.float32(loss_scale)
            missing -= run_step(exchanges, grads)[0]["matrix"] / loss_scale
    assert np.abs(missing).max() < 0.02


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_signs_bring_densely_what_comes_in_the_size_of_gradients(loss_scale):
    rng, shapes, missing = np.random.default_rng(0), {"matrix": (40, 50)}, np.zeros(2000)
    exchanges = ranks("topk:ratio=0.01", 2, shapes)
    rescale(exchanges, loss_scale)
    for spec in ("topk:ratio=0.01", "signsgd"):
        switch(exchanges, spec, shapes=shapes)
        grads = gradients(rng, 2, shapes)
        missing += np.mean([named["matrix"] for named in grads], axis=0)
        for named in grads:
            named["matrix"] *= np.float32(loss_scale)
        missing -= run_step(exchanges, grads)[0]["matrix"] / loss_scale
    assert np.abs(missing).max() < 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_is_counted_once(momentum, nesterov):
    """What a host's momentum would have made of all gradients is what has come, and what is to
    come, before a switch and after it."""
    shapes, rng = {"matrix": (30, 40), "small": (9,)}, np.random.default_rng(0)
    corrected = f"dgc:ratio=0.05,masking=false,momentum={momentum},nesterov={str(nesterov).lower()}"
    exchanges = ranks(corrected, 2, shapes)
    come = {name: 0.0 for name in shapes}
    brought = {name: 0.0 for name in shapes}
    # What a host with momentum makes of a result in the end.
    whole = 1 / (1 - momentum)
    for spec, gain in (
        (corrected, 1.0),
        ("topk:ratio=0.05", whole),
        ("none", 1.0),
        (corrected, 1 / whole),
        ("adacomp", whole),
    ):
        switch(exchanges, spec, gain, shapes)
        its = 1.0 if spec == corrected else whole
        for _ in range(5):
            grads = gradients(rng, 2, shapes)
            for name in shapes:
                come[name] += (
                    np.mean([named[name] for named in grads], axis=0, dtype=np.float64) * whole
                )
            results = run_step(exchanges, grads)
            for name in shapes:
                brought[name] += results[0][name].astype(np.float64) * its
        for name in shapes:
            total = brought[name] + its * owed(exchanges, name)
            assert np.abs(total - come[name]).max() <= 1e-4 * np.abs(come[name]).max(), (spec, name)


def test_other_options_of_an_algorithm_keep_its_state():
    rng = np.random.default_rng(1)
    exchanges = ranks("dgc:ratio=0.01", 1)
    run_step(exchanges, gradients(rng, 1))
    before = {key: array.copy() for key, array in exchanges[0].arrays()["matrix"].items()}
    switch(exchanges, "dgc:ratio=0.1")
    after = exchanges[0].arrays()["matrix"]
    assert before.keys() == after.keys() == {"u", "v"}
    for key in before:
        assert np.array_equal(before[key], after[key])
    assert exchanges[0].stats()["steps"] == 1 and exchanges[0].stats()["bytes_sent"] > 0


def test_what_has_no_place_is_sent_densely_once():
    rng = np.random.default_rng(2)
    exchanges = ranks("topk:ratio=0.01", 2)
    run_step(exchanges, gradients(rng, 2))
    owing = owed(exchanges, "matrix")
    switch(exchanges, "maxnorm:bits=4")
    assert np.allclose(owed(exchanges, "matrix"), owing)
    grads = gradients(rng, 2)
    expected = np.mean([named["matrix"] for named in grads], axis=0) + owing
    sent = exchanges[0].stats()["bytes_sent"]
    results = run_step(exchanges, grads)
    assert np.allclose(results[0]["matrix"], expected, atol=1e-6)
    assert exchanges[0].stats()["bytes_sent"] - sent >= 4 * 2000
    for exchange in exchanges:
        exchange.end_step()
        assert DEBT not in exchange.arrays()["matrix"]
    sent = exchanges[0].stats()["bytes_sent"]
    run_step(exchanges, gradients(rng, 2))
    assert exchanges[0].stats()["bytes_sent"] - sent < 4 * 2000


def test_a_discarded_step_owes_again():
    from horovod_compress.engine.discard import discard

    rng = np.random.default_rng(3)
    exchanges = discardable(ranks("topk:ratio=0.01", 1))
    run_step(exchanges, gradients(rng, 1))
    switch(exchanges, "qsgd")
    owing = owed(exchanges, "matrix")
    run_step(exchanges, gradients(rng, 1))
    discard(exchanges[0])
    assert np.array_equal(owed(exchanges, "matrix"), owing) and np.any(owing)


def test_a_mistake_changes_nothing():
    rng = np.random.default_rng(4)
    (exchange,) = ranks("topk:ratio=0.01", 1)
    run_step([exchange], gradients(rng, 1))
    before, compressor = exchange.state_dict(), get_compressor("adacomp")
    transport, machine = exchange.transport, exchange.tensors.machine
    others = {"transport": Loopback.group(2)[0], "machine": object()}
    with pytest.raises(TypeError):
        exchange.switch(compressor, {"matrix": (None, compressor)}, {}, **others)
    assert exchange.tensors.compressor.id == "topk"
    assert exchange.transport is transport and exchange.tensors.machine is machine
    for name, named in exchange.state_dict()["tensors"].items():
        for key, array in named.items():
            assert np.array_equal(array, before["tensors"][name][key])


def test_another_transport_moves_the_next_step():
    before, after = Loopback.group(2), Loopback.group(2)
    compressor = get_compressor("topk:ratio=0.01")
    exchanges = make_ranks(compressor, SHAPES, before)
    tensors = {name: (shape, compressor) for name, shape in SHAPES.items()}
    rng = np.random.default_rng(6)
    run_step(exchanges, gradients(rng, 2))
    sent = exchanges[0].totals()["bytes_sent"]
    for exchange, transport in zip(exchanges, after):
        exchange.switch(compressor, tensors, {}, transport=transport)
    old = before[0].bytes_sent
    run_step(exchanges, gradients(rng, 2))
    assert before[0].bytes_sent == old and after[0].bytes_sent == 2 * sent


def test_updates_that_are_switched_before_their_first_step_are_compared_in_it():
    torch = pytest.importorskip("torch")
    from test_port import ToyRanks

    from horovod_compress.torch_common.updates import UpdateCompression

    def first_step(rank, transport):
        params = {"w": torch.zeros(4)}
        compression = UpdateCompression(ToyRanks(transport), "topk", params, {}, "broadcast")
        compression.switch("fp16")
        with pytest.raises(MismatchError, match="rank 1 differs from rank 0 in parameters.w"):
            compression.begin({"w": rank}, 0)

    on_all_ranks(first_step, range(2))


def test_an_owing_state_that_does_not_fit_is_refused():
    rng = np.random.default_rng(5)
    (exchange,) = ranks("topk:ratio=0.01", 1)
    run_step([exchange], gradients(rng, 1))
    switch([exchange], "qsgd")
    state = exchange.state_dict()
    state["tensors"]["matrix"][DEBT] = state["tensors"]["matrix"][DEBT][:-1]
    with pytest.raises(ValueError, match=f"matrix.{DEBT}"):
        ranks("qsgd", 1)[0].load_state_dict(state)
    assert checkpoint.read(state)


@pytest.mark.parametrize("nesterov", [False, True])
def test_tensors_that_become_dense_under_momentum_lose_none_of_it(nesterov):
    """Of what is owed to a tensor that dgc does not compress momentum makes more, and of the
    gradient that comes with it, too."""
    rng, momentum, whole = np.random.default_rng(6), 0.9, 10.0
    compressed = (
        f"dgc:ratio=0.05,masking=false,momentum={momentum},nesterov={str(nesterov).lower()}"
    )
    dense, topk, come, brought = f"{compressed},min_numel=100000", "topk:ratio=0.05", 0.0, 0.0
    exchanges = ranks(topk, 2)
    for spec, gain, its in (
        (topk, 1.0, whole),
        (dense, 1 / whole, 1.0),
        (topk, whole, whole),
        (compressed, 1 / whole, 1.0),
        (dense, 1.0, 1.0),
    ):
        switch(exchanges, spec, gain)
        for _ in range(4):
            grads = gradients(rng, 2)
            come = come + whole * np.mean(
                [named["matrix"] for named in grads], axis=0, dtype=np.float64
            )
            brought = brought + its * run_step(exchanges, grads)[0]["matrix"].astype(np.float64)
        error = np.abs(brought + its * owed(exchanges, "matrix") - come).max() / np.abs(come).max()
        assert error < 1e-6, (spec, error)


def test_a_step_that_fails_leaves_what_is_owed_once():
    """Also where the new compressor has a residual, in which a failed step's gradient stays."""
    rng = np.random.default_rng(7)
    exchanges = ranks("topk:ratio=0.01", 2)
    run_step(exchanges, gradients(rng, 2))
    switch(exchanges, "efsignsgd:follow_lr=true")
    grads, before = gradients(rng, 2), owed(exchanges, "matrix")
    expected = before + np.mean([named["matrix"] for named in grads], axis=0)
    grads[1]["matrix"][3] = np.nan
    run_step(exchanges, grads)
    after = owed(exchanges, "matrix")
    assert np.allclose(np.delete(after, 3), np.delete(expected, 3), atol=1e-5)


@pytest.mark.parametrize("spec", ["fp16", "dgc:min_numel=100000,dense=fp16,momentum=0.9"])
def test_what_the_host_reduces_keeps_its_type(spec):
    """Where a graph was made for float16, what is owed comes in float16, too."""
    rng = np.random.default_rng(8)
    exchanges = ranks("topk:ratio=0.01", 2)
    run_step(exchanges, gradients(rng, 2))
    switch(exchanges, spec)
    grads, sent = gradients(rng, 2), exchanges[0].stats()["bytes_sent"]
    share = 0.1 if "dgc" in spec else 1  # momentum brings the rest later
    expected = share * owed(exchanges, "matrix") + np.mean(
        [named["matrix"] for named in grads], axis=0
    )
    assert np.allclose(run_step(exchanges, grads)[0]["matrix"], expected, atol=1e-2)
    assert exchanges[0].stats()["bytes_sent"] - sent == 2 * 2007
