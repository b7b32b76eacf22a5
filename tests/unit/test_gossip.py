"""Decentralized training: topologies, rules, and N ranks in one process."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod_compress as hc
from horovod_compress.decentralized.rules import ALGORITHMS
from horovod_compress.decentralized.topology import Topology, metropolis
from horovod_compress.kernels import Encoded, new_body
from horovod_compress.protocol import wire
from horovod_compress.transport.loopback import Loopback

SHAPES = {"w": (30, 40), "x": (40, 40), "bias": (40,)}
# Of messages that lose much, whatever is in them.
COARSE = "qsgd:bits=3,norm=max,min_numel=0"


def start_of(seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}


class Local:
    """Local steps that do not depend on the parameters, by step and rank, and what they have
    added."""

    def __init__(self, ranks, seed=0, size=0.05):
        self.ranks, self.seed, self.size = ranks, seed, size
        self.moved = []

    def update(self, step, rank, name):
        rng = np.random.default_rng([self.seed, step, rank, len(name), ord(name[0])])
        return (self.size * rng.standard_normal(SHAPES[name])).astype(np.float32)

    def __call__(self, step, rank, parameters):
        for name, x in parameters.items():
            x += self.update(step, rank, name)


def trained(spec, algorithm, ranks=4, steps=12, topology="ring", seed=0, step=None):
    local = Local(ranks, seed)
    start = start_of(seed)
    run = hc.simulate_decentralized(
        spec, start, local, ranks, steps, topology, algorithm, step=step
    )
    return run, local, start


def mean_moved(local, start, steps):
    """Where the mean model is if exchanges leave it alone."""
    return {
        n: x
        + sum(local.update(t, r, n) for t in range(steps) for r in range(local.ranks)) / local.ranks
        for n, x in start.items()
    }


def worst(a, b):
    return max(np.abs(a[n] - b[n]).max() / max(np.abs(b[n]).max(), 1e-30) for n in b)


# -- topologies


@given(st.integers(1, 40), st.sampled_from(["ring", "torus", "complete"]))
def test_weights_are_symmetric_and_doubly_stochastic(size, name):
    found = Topology(name, size)
    w = found.weights
    assert (w == w.T).all() and (w >= 0).all()
    np.testing.assert_allclose(w.sum(axis=1), 1, rtol=1e-12)
    values = sorted(np.linalg.eigvals(w - np.ones((size, size)) / size).real, key=abs)
    assert math.isclose(found.rho, abs(values[-1]), abs_tol=1e-9) and found.rho < 1
    assert all(
        rank in found.neighbors(other) for rank in range(size) for other in found.neighbors(rank)
    )


def test_known_topologies():
    # Of a ring: 1 and 2/3·cos(2πk/N) + 1/3 are the eigenvalues.
    for size in (3, 4, 8, 16):
        values = [1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / size) for k in range(1, size)]
        ring = Topology("ring", size)
        assert math.isclose(ring.rho, max(map(abs, values)), abs_tol=1e-9)
    assert Topology("ring", 2).weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    for name, size, neighbors in (
        ("ring", 1, 0),
        ("torus", 16, 4),
        ("torus", 7, 2),
        ("complete", 8, 7),
    ):
        assert len(Topology(name, size).neighbors(0)) == neighbors
    assert Topology("complete", 8).rho < 1e-12


@pytest.mark.parametrize(
    "given_, words",
    [
        ("star", "ring, torus, complete"),
        ([[1]], r"\(3, 3\)"),
        ([[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]], "ranks 1, 2 are not connected"),
        ([[0.5, 0.5, 0], [0.4, 0.2, 0.4], [0, 0.4, 0.6]], "ranks 0 and 1 have 0.5 and 0.4"),
        ([[0.5, 0.5, 0], [0.5, 0.1, 0.5], [0, 0.5, 0.5]], "rank 1 sum to 1.1"),
        ([[1.5, -0.5, 0], [-0.5, 1, 0.5], [0, 0.5, 0.5]], "not negative"),
        ([["a"]], "not a matrix"),
    ],
)
def test_topologies_that_are_refused(given_, words):
    with pytest.raises(ValueError, match=words):
        Topology(given_, 3)


def test_weights_may_be_a_tensor_that_requires_a_gradient():
    torch = pytest.importorskip("torch")
    weights = torch.full((3, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    assert Topology(weights, 3).neighbors(0) == [1, 2]


def test_weights_that_one_rank_has_only_by_rounding_are_none():
    weights = metropolis(np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]]))
    weights[0, 2] = 1e-17
    topology = Topology(weights, 3)
    assert topology.neighbors(0) == [1] and topology.neighbors(2) == [1]
    assert (topology.weights == topology.weights.T).all()


def test_ranks_without_weight_of_their_own_never_agree():
    with pytest.raises(ValueError, match="weight of their own"):
        Topology([[0, 1], [1, 0]], 2)


# -- the laws


@settings(max_examples=8)
@given(
    st.integers(1, 5),
    st.sampled_from(["ring", "torus", "complete"]),
    st.integers(0, 1000),
    st.sampled_from(["exact", "dcd", "ecd"]),
)
def test_exact_messages_are_d_psgd(ranks, topology, seed, algorithm):
    """x ← W x + Δ, of all ranks at once."""
    run, local, start = trained("none", algorithm, ranks, 10, topology, seed)
    w = Topology(topology, ranks).weights
    for name in start:
        x = np.stack([start[name].astype(np.float64)] * ranks)
        for t in range(10):
            x = np.tensordot(w, x, 1) + np.stack([local.update(t, r, name) for r in range(ranks)])
        for rank in range(ranks):
            # ECD multiplies differences by t/2, rounding too.
            np.testing.assert_allclose(run.parameters[rank][name], x[rank], atol=3e-5)


def test_on_a_complete_graph_exact_messages_are_plain_averaging():
    run, local, start = trained("none", "exact", 4, 10, "complete")
    expected = mean_moved(local, start, 10)
    assert worst(run.mean, expected) < 1e-6
    # All but the last step's own update are the same on all ranks.
    for rank, its in enumerate(run.parameters):
        before = {n: x - local.update(9, rank, n) for n, x in its.items()}
        of_all = mean_moved(local, start, 9)
        assert worst(before, of_all) < 1e-6


@settings(max_examples=10)
@given(
    st.integers(1, 5),
    st.sampled_from(["ring", "torus", "complete"]),
    st.integers(0, 1000),
    st.sampled_from(["qsgd:bits=2", "topk:ratio=0.05", "efsignsgd", "natural", "strom:tau=0.1"]),
    st.floats(0.05, 1),
)
def test_choco_leaves_the_mean_alone_whatever_messages_lose(ranks, topology, seed, spec, step):
    run, local, start = trained(spec, "choco", ranks, 6, topology, seed, step)
    assert worst(run.mean, mean_moved(local, start, 6)) < 1e-5


def test_dcd_moves_the_mean_by_what_messages_lose():
    """mean(x⁺) − mean(x) = mean(Δ) + mean(C(z) − z)."""
    ranks, steps = 4, 6
    lost = {n: np.zeros(s) for n, s in SHAPES.items()}
    w = Topology("ring", ranks).weights
    before = {}

    class Watching(Local):
        def __call__(self, step, rank, parameters):
            before[step, rank] = {n: x.copy() for n, x in parameters.items()}
            super().__call__(step, rank, parameters)

    local, start = Watching(ranks), start_of()
    run = hc.simulate_decentralized(COARSE, start, local, ranks, steps)
    for t in range(steps):
        for n in SHAPES:
            x = np.stack([before[t, r][n] for r in range(ranks)]).astype(np.float64)
            z = np.tensordot(w, x, 1) - x + [local.update(t, r, n) for r in range(ranks)]
            after = [
                run.parameters[r] if t == steps - 1 else before[t + 1, r] for r in range(ranks)
            ]
            lost[n] += np.mean([after[r][n] - x[r] - z[r] for r in range(ranks)], axis=0)
    expected = mean_moved(local, start, steps)
    assert worst(run.mean, {n: expected[n] + lost[n] for n in SHAPES}) < 1e-5
    assert worst(run.mean, expected) > 1e-3


@settings(max_examples=8)
@given(
    st.integers(1, 5), st.sampled_from(["ring", "torus", "complete"]), st.sampled_from(ALGORITHMS)
)
def test_what_is_mixed_is_the_mean_of_public_copies(ranks, topology, algorithm):
    """W x̂ over all ranks, and in DCD each rank's parameters are its public copy."""
    run, _, _ = trained(COARSE, algorithm, ranks, 15, topology)
    w = Topology(topology, ranks).weights
    for name in SHAPES:
        copies = [gossip.copies[name] for gossip in run.gossips]
        public = np.stack([each.public for each in copies])
        for rank, each in enumerate(copies):
            np.testing.assert_allclose(each.mixed, w[rank] @ public, rtol=1e-12, atol=1e-12)
            if algorithm in ("dcd", "exact"):
                shown = each.public.astype(np.float32)
                assert (shown == run.parameters[rank][name].reshape(-1)).all()


@pytest.mark.parametrize("algorithm, spec", [("dcd", "none"), ("choco", "efsignsgd")])
def test_rounding_moves_no_mean(algorithm, spec):
    """After 100 steps of updates nothing is added, and the mean model stays where it is."""
    means = []

    def local(step, rank, parameters):
        rng = np.random.default_rng([step, rank])
        if step < 100:
            parameters["w"] += 1e-3 * rng.standard_normal(200).astype(np.float32)
        if not rank:
            means.append(0.0)
        means[-1] = means[-1] + parameters["w"].astype(np.float64) / 4

    start = {"w": np.random.default_rng(0).standard_normal(200).astype(np.float32)}
    run = hc.simulate_decentralized(spec, start, local, 4, 1000, algorithm=algorithm)
    assert np.abs(means[-1] - means[100]).max() < 1e-5
    assert np.abs(run.mean["w"] - means[100]).max() < 1e-5


def test_arrays_that_a_local_step_puts_in_place_of_its_own_are_refused():
    def local(step, rank, parameters):
        parameters["w"] = parameters["w"] + 1

    with pytest.raises(ValueError, match="another array in place of 'w'"):
        hc.simulate_decentralized("none", {"w": np.zeros(3, np.float32)}, local, 2, 1)


def test_ecd_is_the_papers():
    """Written down once more, with an estimate of each rank and the same
    messages."""
    ranks, steps, name = 3, 8, "w"
    local, start = Local(ranks), start_of()
    run = hc.simulate_decentralized("fp16", start, local, ranks, steps, algorithm="ecd")
    w = Topology("ring", ranks).weights
    x = np.stack([start[name].astype(np.float64)] * ranks)
    estimate = x.copy()
    for t in range(1, steps + 1):
        new = np.tensordot(w, estimate, 1) + [local.update(t - 1, r, name) for r in range(ranks)]
        z = (1 - 0.5 * t) * x + 0.5 * t * new
        sent = z.astype(np.float32).astype(np.float16).astype(np.float64)
        estimate = (1 - 2 / t) * estimate + 2 / t * sent
        x = new
    for rank in range(ranks):
        np.testing.assert_allclose(run.parameters[rank][name], x[rank], atol=2e-3)
        found = run.gossips[rank].copies[name].public.reshape(SHAPES[name])
        np.testing.assert_allclose(found, estimate[rank], atol=2e-3)


def test_choco_is_the_papers():
    """Algorithm 2 of arXiv 1902.00340, with a copy of each rank, and the largest tenth sent."""
    ranks, steps, name, zeta = 4, 8, "w", 0.3
    local, start = Local(ranks), start_of()
    spec = "topk:k=120,sample_ratio=1,min_numel=0"
    run = hc.simulate_decentralized(spec, start, local, ranks, steps, "ring", "choco", zeta)
    w = Topology("ring", ranks).weights
    x = np.stack([start[name].astype(np.float64)] * ranks)
    public = x.copy()
    for t in range(steps):
        x += [local.update(t, r, name) for r in range(ranks)]
        for rank in range(ranks):
            z = (x[rank] - public[rank]).reshape(-1)
            largest = np.argsort(-np.abs(z))[:120]
            public[rank].reshape(-1)[largest] += z[largest]
        x += zeta * (np.tensordot(w, public, 1) - public)
    for rank in range(ranks):
        np.testing.assert_allclose(run.parameters[rank][name], x[rank], atol=1e-5)


def test_exchanges_bring_ranks_together():
    apart = {}
    for algorithm in (*ALGORITHMS, None):
        if algorithm is None:
            local = Local(8)
            alone = [start_of() for _ in range(8)]
            for t in range(40):
                for rank in range(8):
                    local(t, rank, alone[rank])
            mean = {n: np.mean([its[n] for its in alone], axis=0) for n in SHAPES}
            apart[None] = np.sqrt(sum(((alone[0][n] - mean[n]) ** 2).sum() for n in SHAPES))
            continue
        spec = "fp16" if algorithm == "ecd" else "qsgd:bits=8,norm=max"
        run, _, _ = trained(spec, algorithm, 8, 40)
        apart[algorithm] = np.sqrt(
            sum(((run.parameters[0][n] - run.mean[n]) ** 2).sum() for n in SHAPES)
        )
    assert all(apart[algorithm] < 0.5 * apart[None] for algorithm in ALGORITHMS), apart


# -- what is refused, and what goes wrong


@pytest.mark.parametrize(
    "spec, words",
    [
        ("dgc", "dgc .*momentum"),
        ("maxnorm", "maxnorm .*share a scale"),
        ("multiscale", "multiscale .*share a scale"),
        ("terngrad", "terngrad .*share a scale"),
        ("signsgd", "signsgd .*sums over ranks"),
        ("powersgd", "powersgd .*sums over ranks"),
        ("globalrandk", "globalrandk .*sums over ranks"),
        ("variance", "variance .*earlier steps have left"),
        ("qsgd:dense=int8", "dense=int8"),
        ("topk:exchange=split", "exchange=split"),
        ("topk:hosts=true", "hosts=true"),
        ("efsignsgd:follow_lr=true", "follow_lr"),
    ],
)
def test_compressions_that_are_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        trained(spec, "dcd", 2, 1)


def test_options_that_are_refused():
    for options, words in (
        ({"algorithm": "choco", "step": "x"}, "step must be a number above 0, at most 1, not 'x'"),
        ({"algorithm": "dcd", "ranks": 0}, "ranks must be a number of ranks, 1 or more, not 0"),
        ({"algorithm": "dcd", "ranks": -1}, "1 or more, not -1"),
        ({"algorithm": "dcd", "steps": -1}, "steps must be a whole number, 0 or more, not -1"),
        ({"algorithm": "dcd", "steps": 1.5}, "steps must be a whole number"),
        ({"algorithm": "sgd"}, "dcd, ecd, choco, exact"),
        ({"algorithm": "dcd", "step": 0.5}, "step is choco's"),
        ({"algorithm": "choco", "step": 2}, "at most 1"),
    ):
        with pytest.raises(ValueError, match=words):
            trained("none", **options)
    with pytest.raises(ValueError, match="start must have the parameters"):
        hc.simulate_decentralized("none", {}, print, 2, 1)


SERVING = sorted(
    set(hc.available())
    - {"dgc", "maxnorm", "multiscale", "terngrad", "signsgd", "powersgd", "globalrandk", "variance"}
)


@pytest.mark.parametrize("id", [id for id in SERVING if hc.available()[id]["paper"]])
def test_every_other_algorithm_keeps_nothing_of_earlier_messages(id):
    """A message of zeros is one, whatever was sent before."""
    options = {"strom": "strom:tau=0.02", "topk": "topk:ratio=0.1", "randomk": "randomk:ratio=0.1"}
    spec, rest = options.get(id, id), []
    zeroed = 3

    def local(step, rank, parameters):
        if step < zeroed:
            for x in parameters.values():
                x += np.float32(0.1) * np.random.default_rng([step, rank]).standard_normal(
                    x.shape
                ).astype(np.float32)
        else:
            rest.append({n: x.copy() for n, x in parameters.items()})

    # On one rank z is Δ in DCD.
    run = hc.simulate_decentralized(spec, start_of(), local, 1, zeroed + 2)
    last = run.parameters[0]
    assert all((its[n] == last[n]).all() for its in rest for n in last)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_that_is_not_finite_is_taken_back_on_its_rank_alone(algorithm):
    """The rank takes part with an update of zero, so what is mixed stays right."""
    seen = {}

    def local(step, rank, parameters):
        seen[step, rank] = {n: x.copy() for n, x in parameters.items()}
        for name, x in parameters.items():
            x += Local(3).update(step, rank, name)
        if (step, rank) == (4, 1):
            parameters["w"][3, 5] = np.nan
            parameters["x"][0] = np.inf

    spec = "fp16" if algorithm == "ecd" else "qsgd:bits=8,norm=max"
    run = hc.simulate_decentralized(spec, start_of(), local, 3, 8, algorithm=algorithm)
    assert [stats["steps_undone"] for stats in run.stats] == [0, 1, 0]
    assert all(np.isfinite(x).all() for its in run.parameters for x in its.values())
    w = Topology("ring", 3).weights
    for name in SHAPES:
        public = np.stack([gossip.copies[name].public for gossip in run.gossips])
        for rank, gossip in enumerate(run.gossips):
            np.testing.assert_allclose(gossip.copies[name].mixed, w[rank] @ public, atol=2e-3)


def test_a_rank_beyond_float32_is_an_error_that_names_it():
    def local(step, rank, parameters):
        for x in parameters.values():
            x.fill((-1) ** step * 3e38 if rank == 1 else 0)

    # In the last exchange too.
    for steps in (8, 2):
        with pytest.warns(RuntimeWarning), pytest.raises(FloatingPointError, match="rank 1 .*dive"):
            hc.simulate_decentralized("none", start_of(), local, 2, steps, algorithm="choco")


def exchange(run, damage=lambda frames, rank: None):
    """One exchange without local steps. Returns {rank: its error}."""
    values = [{n: x.reshape(-1) for n, x in its.items()} for its in run.parameters]
    errors = {}
    for gossip, its in zip(run.gossips, values):
        gossip.start(its)
    for rank, (gossip, its) in enumerate(zip(run.gossips, values)):
        frames = {other: frame.copy() for other, frame in gossip._wait().items()}
        damage(frames, rank)
        gossip._wait = lambda frames=frames: frames
        try:
            gossip.finish(its)
        except (hc.WireError, FloatingPointError) as error:
            errors[rank] = error
    return errors


def everything(run):
    """Bits of all that exchanges change."""
    return [
        x.tobytes()
        for gossip, its in zip(run.gossips, run.parameters)
        for n in SHAPES
        for x in (its[n], *gossip.copies[n].arrays().values())
    ]


def test_ranks_tell_each_other_of_a_damaged_message_and_raise_one_error_together():
    """On a ring of five rank 3 is two exchanges from rank 1, and hears of the earlier of two
    failures."""
    run, _, _ = trained(COARSE, "dcd", 5, 3)

    def damage(frames, rank):
        if rank in (1, 4):
            frames[rank - 1][40] ^= 1

    before = everything(run)
    with pytest.warns(RuntimeWarning, match="2 exchanges later: .* of its neighbor 0: .*check"):
        assert not exchange(run, lambda frames, rank: rank == 1 and damage(frames, rank))
    after = everything(run)
    its = len(before) // 5
    assert before[its : 2 * its] == after[its : 2 * its] and before[2 * its :] != after[2 * its :]
    with pytest.warns(RuntimeWarning, match="rank 4: the message of its neighbor 3"):
        assert not exchange(run, lambda frames, rank: rank == 4 and damage(frames, rank))
    errors = exchange(run)
    assert len({str(error) for error in errors.values()}) == 1 and sorted(errors) == list(range(5))
    for error in errors.values():
        assert isinstance(error, hc.WireError)
        assert "rank 1: the message of its neighbor 0: " in str(error)


def test_messages_of_another_step_or_configuration_are_refused_by_both_ranks():
    other, _, _ = trained(COARSE + ",seed=1", "dcd", 2, 3)
    for attribute, wrong, words in (
        ("steps", 4, "of step"),
        ("_digest", other.gossips[1]._digest, "neighbor [01]: .*configuration"),
    ):
        run, _, _ = trained(COARSE, "dcd", 2, 3)
        before = everything(run)
        setattr(run.gossips[1], attribute, wrong)
        with pytest.warns(RuntimeWarning, match=words):
            assert not exchange(run)
            errors = exchange(run)
        assert sorted(errors) == [0, 1] and everything(run) == before
        for error in errors.values():
            with pytest.raises(hc.WireError, match=words):
                raise error


def inf(part):
    changed = part.copy()
    changed[-4:] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
    return changed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "spec, damage, kind, words",
    [
        (COARSE, lambda part: part[:-1], hc.WireError, "neighbor 0, bias: "),
        ("none", lambda part: part[4:], hc.WireError, "neighbor 0, bias: 156 bytes"),
        ("none", inf, FloatingPointError, "parameters of rank 0 .*diverged"),
        ("bf16", inf, FloatingPointError, "parameters of rank 0 "),
    ],
)
def test_nothing_is_changed_by_messages_whose_last_part_cannot_be_used(
    algorithm, spec, damage, kind, words
):
    """Their checksums are right."""
    run, _, _ = trained(spec, algorithm, 1, 3)
    before = everything(run)

    def forge(frames, rank):
        (gossip,) = run.gossips
        *parts, last = gossip._opened(0, frames[0])
        forged = [*parts, damage(last)]
        body = new_body(np.array([0, *map(len, forged)], np.int64), *forged)
        frames[0] = wire.seal([Encoded(body, 0)], gossip._number, gossip._digest, gossip.steps, 0)

    errors = exchange(run, forge)
    with pytest.raises(kind, match=words):
        raise errors[0]
    assert everything(run) == before


@pytest.mark.parametrize("lengths", [[], [-8, 8, 8, 0], [2**62, 2**62, 2**62, 0], [0, 0, 0, 0]])
def test_messages_whose_parts_do_not_make_them_up_are_refused(lengths):
    run, _, _ = trained(COARSE, "dcd", 1, 1)
    (gossip,) = run.gossips
    body = new_body(
        np.array(lengths, np.int64), np.zeros(7 if lengths == [0, 0, 0, 0] else 0, np.uint8)
    )
    frame = wire.seal([Encoded(body, 0)], gossip._number, gossip._digest, gossip.steps, 0)
    gossip._wait = lambda: {0: frame}
    with pytest.raises(hc.WireError, match="neighbor 0: its parts do not make it up"):
        gossip.finish({})


def test_alpha_is_measured():
    run, _, _ = trained("topk:k=120,min_numel=0", "dcd", 2, 20)
    assert 0.5 < run.stats[0]["alpha"] < 1
    run, _, _ = trained("none", "dcd", 2, 20)
    assert run.stats[0]["alpha"] == 0
    assert trained("none", "dcd", 2, 9)[0].stats[0]["alpha"] is None
    # Once there are ten of them, of every tenth step.
    for steps in (99, 100):
        run, _, _ = trained("qsgd:bits=2,norm=l2,min_numel=0", "dcd", 2, steps)
        assert run.stats[0]["alpha"] > 1 and run.gossips[0].loses_too_much == (steps == 100)


def test_bytes_are_counted():
    run, _, _ = trained("qsgd:bits=4,norm=max", "dcd", 8, 5)
    stats = run.stats[0]
    numel = sum(map(math.prod, SHAPES.values()))
    assert stats["dense_bytes"] == 5 * 2 * 4 * numel
    assert stats["bytes_sent"] == stats["bytes_received"] or stats["bytes_received"] > 0
    assert 5 < stats["ratio"] < 7 and stats["steps"] == 5


# -- the transport's verb


@pytest.mark.parametrize("size", [1, 2, 5])
def test_neighbors_get_each_others_payloads(size):
    ring = Topology("ring", size)
    group = Loopback.group(size)
    payloads = [np.full(rank + 1, rank, np.uint8) for rank in range(size)]
    waits = [each.neighbors("n", payloads[each.rank], ring.neighbors(each.rank)) for each in group]
    for rank, wait in enumerate(waits):
        found = wait()
        assert list(found) == ring.neighbors(rank)
        assert all((payload == payloads[other]).all() for other, payload in found.items())


# -- the optimizer of Horovod's ranks, on one


@pytest.fixture
def alone():
    """(a parameter, a buffer, and a DecentralizedOptimizer that has the parameter)."""
    torch, hvd = pytest.importorskip("torch"), pytest.importorskip("horovod.torch")
    import horovod_compress.torch as hvdc

    hvd.init()
    if not hvd.global_process_set.included():
        # As where horovod.tensorflow was imported too.
        hvd.init()
    param = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([param], lr=0.1)
    return param, torch.zeros(3), hvdc.DecentralizedOptimizer(sgd)


def take_steps(param, optimizer, count):
    for _ in range(count):
        param.grad = param.detach().clone()
        optimizer.step()


def test_totals_are_those_of_this_process_after_a_resume(alone):
    param, _, optimizer = alone
    take_steps(param, optimizer, 3)
    state = optimizer.state_dict(portable=True)
    assert optimizer.stats()["steps"] == 3
    optimizer.load_state_dict(state)
    take_steps(param, optimizer, 2)
    again = type(optimizer)(optimizer._optimizer)
    again.load_state_dict(state)
    take_steps(param, again, 2)
    for its, steps in ((optimizer, 5), (again, 2)):
        stats = its.stats()
        assert stats["steps"] == steps and its._gossip.steps == 5
        assert stats["dense_bytes"] == 0 and stats["steps_undone"] == 0


def test_what_an_inner_mean_shows_beside_comes_back(alone):
    param, buffer, optimizer = alone
    with optimizer.mean_parameters():
        with optimizer.mean_parameters([buffer]):
            param.data.add_(1)
            buffer.add_(1)
        assert buffer.tolist() == [0, 0, 0] and param.tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="outside of .with"):
            optimizer.state_dict()
    assert param.tolist() == [1, 1, 1]
    take_steps(param, optimizer, 1)


def test_no_state_is_loaded_where_the_model_shows_the_mean(alone):
    param, _, optimizer = alone
    state = optimizer.state_dict(portable=True)
    with optimizer.mean_parameters(), pytest.raises(RuntimeError, match="not within it"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(state)
