"""The traps that other implementations of the papers fell into."""

import numpy as np
import pytest
from paper_checks import alone, decoded, normal, payload_of, seeded  # noqa: F401
from ranks import ranks_of

import horovod_compress as hc
from horovod_compress.engine.lockstep import run_step
from horovod_compress.kernels import Encoded


@pytest.mark.parametrize("ranks, values", [(1, "fp32"), (2, "fp32"), (2, "fp16")])
def test_momentum_is_taken_once(ranks, values):
    """The stream of dgc has all of the momentum, once: three equal gradients give 1, 1.9, 2.71
    times them, whether they are gathered or go dense."""
    g = normal(40, 40)
    run = hc.simulate(f"dgc:ratio=1,momentum=0.9,values={values}", [[{"t": g}] * ranks] * 3)
    for mean, times in zip(run.mean, (1, 1.9, 2.71)):
        np.testing.assert_allclose(mean["t"], times * g, rtol=3e-3)
    assert hc.get_compressor("dgc").bound(0.8, True).m == 0.8
    assert not hc.get_compressor("dgc").bound(0.0, False).init("t", (40, 40)).arrays.keys() & {"u"}


@pytest.mark.parametrize("values", ["fp16", "bf16"])
def test_indices_are_not_narrowed_with_the_values(values):
    """Indices beyond 2048 and 65504, which a cast to float16 would round or make infinite."""
    g = np.zeros((500, 1000), np.float32)
    places = [1, 2049, 65_505, 65_537, 123_457, 499_999]
    g.reshape(-1)[places] = np.arange(1, 7)
    (mean,), _ = alone(f"topk:ratio=0.00002,values={values}", g)
    assert set(np.flatnonzero(mean)) <= set(places) and len(np.flatnonzero(mean)) >= 5


def test_each_rank_has_residuals_of_its_own():
    """A state of rank 0 would lose what the others still hold: state_dict is per rank, and says
    so."""
    exchanges = ranks_of("topk:ratio=0.01,min_numel=0", 2, {"t": (50, 50)})
    run_step(exchanges, [{"t": normal(2500)}, {"t": normal(2500)}])
    states = [exchange.state_dict() for exchange in exchanges]
    assert [state["rank"] for state in states] == [0, 1]
    assert (states[0]["tensors"]["t"]["residual"] != states[1]["tensors"]["t"]["residual"]).any()
    with pytest.raises(ValueError, match="belongs to one rank"):
        exchanges[1].load_state_dict(states[0])


@pytest.mark.parametrize(
    "spec", ["efsignsgd", "onebit", "signsgd", "strom:tau=0.1", "terngrad", "variance"]
)
def test_zeros_beside_other_elements_stay_zero_on_average(spec):
    """One bit has no zero: with error feedback what it says instead comes back; the others say
    0."""
    g = np.zeros(100, np.float32)
    g[:50] = np.where(np.arange(50) % 2, 1, -1)
    means, _ = alone(f"{spec}{',' if ':' in spec else ':'}min_numel=0", *[g] * 60)
    of_zeros = np.mean(means, axis=0)[50:]
    assert np.abs(of_zeros).max() < (0.05 if spec in ("efsignsgd", "onebit") else 1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0.1",
        "dgc:ratio=0.1,momentum=0",
        "strom:tau=0.9",
        "variance",
        "adacomp:bin_length=50",
    ],
)
def test_what_is_sent_does_not_depend_on_where_it_lies(spec):
    """Reversed gradients are sent reversed, ties aside: no preference for low indices."""
    g = normal(100, 100)
    spec += ("," if ":" in spec else ":") + "min_numel=0"
    (forward, again), (backward, its_again) = (
        alone(spec, g, g)[0],
        alone(spec, g[::-1, ::-1], g[::-1, ::-1])[0],
    )
    same = (forward != 0) == (backward[::-1, ::-1] != 0)
    assert same.mean() > 0.97 and ((again != 0) == (its_again[::-1, ::-1] != 0)).mean() > 0.97
    where = np.flatnonzero((forward != 0) | (again != 0))
    assert abs(np.mean(where) - 5000) < 1000


def test_the_ratio_counts_everything():
    """Headers, carriers, scales, indices and the tensors that go dense."""
    shapes = {"w": (100, 100), "bias": (100,)}
    run = hc.simulate(
        "topk:ratio=0.001", [[{n: normal(*s) for n, s in shapes.items()} for _ in range(2)]] * 3
    )
    for stats, sent in zip(run.stats, np.sum(run.bytes_sent, axis=0)):
        assert stats["ratio"] == 3 * 4 * 10_100 / sent
    least = (
        4 * 100 + 4 + 24 + 6 + 4 * 8 + 8
        # Dense bias, carrier, header, head of the body, values, some bits of indices.
    )
    assert min(map(min, run.bytes_sent)) >= least


def test_payloads_are_what_they_decode_to():
    """What encode takes out of residuals is what every rank decodes, bit for bit: nothing is
    rounded on the way."""
    for spec in (
        "topk:ratio=0.1,values=fp16",
        "topk:ratio=0.1,values=bf16",
        "strom:tau=0.3",
        "adacomp",
        "efsignsgd",
        "onebit",
        "randomk:ratio=0.1",
        "variance:error_feedback=true",
    ):
        g = normal(900)
        spec += ("," if ":" in spec else ":") + "min_numel=0"
        payload, compressor, state = payload_of(spec, g, squares=np.zeros(900, np.float32))
        assert isinstance(payload, Encoded)
        sent = decoded(compressor, payload.body, 900)
        compressor.commit(state)
        compressor.apply_pending(state)
        np.testing.assert_array_equal(compressor.residual(state), g - sent)
        assert (
            payload.elements == 900
            if spec.startswith(("ef", "one"))
            else payload.elements == np.count_nonzero(sent)
        )
