"""What compressions bring into a step, by the number of ranks. No times are checked, only what
follows from figures."""

import math
import tracemalloc

import pytest

import horovod_compress as hc
from horovod_compress.protocol.machine import Machine
from horovod_compress.tools import bench, loads, prediction
from horovod_compress.tools.cost import COLLECTIVES, Network

SMALL = loads.Model(
    "small",
    2 * 2**16 + 2 * 4096 + 100,
    {"a": (256, 256), "b": (256, 256), "c": (64, 64), "d": (64, 64), "e": (100,)},
)
# Beside a single small number of ranks, this one makes the loads be extrapolated.
MANY = 10_000


def measured(spec, counts, **options):
    compressor = hc.get_compressor(spec).after_warmup()
    return loads.measured(compressor, SMALL, SMALL.gradients(), counts, **options)


def assert_exchanges(load, found, ranks):
    """The load has the bytes and collectives that bench found; headers aside."""
    for kind in {*load.exchanged, *found["exchanged"]}:
        assert load.exchanged.get(kind, 0) == pytest.approx(
            found["exchanged"].get(kind, 0), rel=0.01, abs=8 * ranks
        )
    assert load.operations == found["operations"]


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "dgc",
        "dgc:dense=fp16,exclude=a",
        "topk:ratio=0.02,min_k=1",
        "topk:k=4000,sample_ratio=1",
        "natural",
        "bf16",
        "maxnorm:bits=4",
        "multiscale",
        "powersgd",
        "signsgd",
    ],
)
def test_bytes_are_those_that_a_step_of_so_many_ranks_exchanges(spec, ranks):
    """topk:ratio=0.02 goes dense on 64 ranks, natural and bf16 from few on."""
    found = bench.measure(hc.get_compressor(spec), SMALL.gradients(), ranks, 2)
    for counts in ([ranks], [ranks, MANY]):
        load = measured(spec, counts)[0]
        assert_exchanges(load, found, ranks)


@pytest.mark.parametrize(
    "spec, rounds, hides",
    [
        ("none", 0, True),
        ("dgc", 0, True),
        ("dgc:clip_norm=1", 0, False),
        ("dgc:transport=mpi", 0, False),
        ("powersgd", 1, False),
        ("signsgd", 0, True),
        ("multiscale", 2, False),
        ("maxnorm", 1, False),
    ],
)
def test_what_hides_behind_backward(spec, rounds, hides):
    (load,) = measured(spec, [2])
    assert (load.rounds, load.hides) == (rounds, hides)
    assert load.last == 2**16 / SMALL.parameters


def test_a_step_is_one_after_the_warmup():
    options = "ratio=0.01", "ratio=0.01,warmup_steps=1000", "schedule=0/0.5+2000/0.01"
    compressors = prediction.compressors_of([f"dgc:{each}" for each in options]).values()
    found = [
        loads.measured(compressor, SMALL, SMALL.gradients(), [2])[0].sent
        for compressor in list(compressors)[2:]
    ]
    assert len(found) == 3 and len(set(found)) == 1


def test_gathered_payloads_are_measured_with_two_numbers_of_ranks(monkeypatch):
    original, asked = loads._measured, []

    def noted(compressor, model, gradients, ranks, *rest):
        asked.append(ranks)
        return original(compressor, model, gradients, ranks, *rest)

    monkeypatch.setattr(loads, "_measured", noted)
    measured("topk", [2, 64, MANY])
    assert asked == [2, 8]


def test_one_rank_of_many_takes_no_memory_of_the_others():
    """Ten thousand ranks' places, 10 000 times, were most of what a prediction took."""
    tracemalloc.start()
    host = Machine.alone(10_000, 4)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert (host.local, host.size, len(host.places)) == (0, 4, 10_000)
    groups = Machine.group(6, 3)
    assert groups[0].places == [0, 1, 2] * 2
    assert all(host.places is groups[0].places for host in groups)
    with pytest.raises(ValueError, match="10 ranks are not hosts of 4"):
        Machine.alone(10, 4)


def test_what_goes_dense_where_that_is_less_never_crosses_a_link_more_often_than_dense():
    """A ring's allreduce takes its bytes over a link nearly twice."""
    counts = [*(2**power for power in range(1, 12)), 3000]
    networks = [
        Network(2, 1.2e-3, 1e-4, dict.fromkeys(COLLECTIVES, 1e-8)).among(n, True) for n in counts
    ]
    dense = [2 * (n - 1) / n * 4 * SMALL.parameters for n in counts]
    for spec in ("none", "fp16", "adacomp", "topk:ratio=0.02", "natural"):
        crossing = [
            load.crossing(network) for load, network in zip(measured(spec, counts), networks)
        ]
        if spec in prediction.BASELINES:
            half = 2 if spec == "fp16" else 1
            assert crossing == pytest.approx([size / half for size in dense])
        # Beside them there are the carriers' bytes.
        assert all(a < b * 1.01 for a, b in zip(crossing, dense)), spec


@pytest.mark.parametrize(
    "hosts, spec",
    [
        (1, "dgc:hosts=true"),
        (3, "dgc:hosts=true"),
        (60, "dgc:hosts=true"),
        (16, "topk:ratio=0.02,min_k=1,hosts=true"),
        (5, "qsgd:hosts=true"),
        (2, "adacomp:hosts=true"),
    ],
)
def test_bytes_on_hosts_are_those_of_a_part(hosts, spec):
    """topk:ratio=0.02 stays sparse on 16 hosts, and dgc goes dense for the small tensors on 60;
    qsgd's all do on 5."""
    ranks = 4 * hosts
    found = bench.measure(hc.get_compressor(spec), SMALL.gradients(), ranks, 2, local_size=4)
    for counts in ([ranks], [ranks, MANY]):
        load = measured(spec, counts, local_size=4)[0]
        assert_exchanges(load, found, ranks)
        assert load.rounds == 1 and not load.hides


def test_hosts_bring_a_rank_what_their_number_of_ranks_would():
    hosts, ranks = (
        measured("topk:ratio=0.01,hosts=true", [64], local_size=size)[0].exchanged
        for size in (8, 1)
    )
    # Headers, and k of a part rounded up.
    assert hosts[loads.GATHERED] == pytest.approx(ranks[loads.GATHERED] / 8, rel=0.15)
    # That all ranks of a host have written each matrix.
    assert hosts["allreduce float32"] == ranks["allreduce float32"] + 4 * 4


@pytest.mark.parametrize("accept", ["auto", 4, 1])
def test_splitting_brings_a_rank_no_more_where_there_are_more(accept):
    counts = [8, 64, MANY]
    gathering = measured("topk:ratio=0.01", [2])[0]
    payload = gathering.exchanged[loads.GATHERED]
    carriers = gathering.exchanged["allreduce float32"]
    spec = f"topk:ratio=0.01,exchange=split,accept={accept}"
    for load, ranks in zip(measured(spec, counts), counts):
        taken = 4 if accept == "auto" else accept
        assert load.received(ranks) - carriers == pytest.approx(
            payload * (1 + taken) * (ranks - 1) / ranks
        )
        operations = {"allreduce float32": 5, "alltoall uint8": 1, loads.GATHERED: 1}
        assert (load.operations, load.rounds) == (operations, 1) and not load.hides
        assert gathering.received(ranks) - carriers == pytest.approx(payload * (ranks - 1))


def test_a_model_of_a_size_is_scaled_from_a_piece(monkeypatch):
    elements = [math.prod(shape) for shape in loads.Model.of_size(1e9).shapes.values()]
    assert sum(elements) == 2**24
    monkeypatch.setattr(loads, "_LARGEST", 2**12)
    monkeypatch.setattr(loads, "_MOST_TENSORS", 20)
    for parameters, tensors in ((1e9, None), (5e5, None), (5e5, 5000), (1e9, 3)):
        model = loads.Model.of_size(parameters, tensors)
        (load,) = loads.measured(hc.get_compressor("none"), model, model.gradients(), [2])
        assert load.sent == pytest.approx(4 * parameters)
        operations = {"allreduce float32": tensors or max(16, parameters / 2**12)}
        assert load.operations == pytest.approx(operations)


def test_small_tensors_gather_together():
    model = loads.Model.of_size(16 * 2048, 16)
    (load,) = loads.measured(hc.get_compressor("topk"), model, model.gradients(), [2])
    # A carrier each, and one message.
    assert load.operations == {"allreduce float32": 16, loads.GATHERED: 1}


def test_what_is_split_goes_dense_where_that_is_less():
    for spec, counts in (("topk:ratio=0.5", [8, 64]), ("topk:ratio=1", [4])):
        (dense,) = measured("none", counts[:1])
        for load in measured(f"{spec},exchange=split", counts):
            assert load.sent == pytest.approx(dense.sent, rel=0.01)
    assert measured("powersgd:start_step=1000", [2])[0].sent == measured("powersgd", [2])[0].sent
