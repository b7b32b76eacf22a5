"""Tensors on a device share launches: a step's results are those of each alone, and what is
launched does not grow with the tensors."""

import contextlib
import itertools
import warnings

import kernel_arguments
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_arguments import Arguments
from one_tensor import cpu
from tiers import examples

from horovod_compress import get_compressor
from horovod_compress.engine import group
from horovod_compress.engine.lockstep import make_ranks, mean_of
from horovod_compress.protocol.wire import WireError
from horovod_compress.tools.bench import measure
from horovod_compress.tools.place import HERE, Place
from horovod_compress.transport.loopback import Loopback

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ranks import OnDevice, discardable  # noqa: E402
from test_device import MOMENTA, encode_topk  # noqa: E402
from test_device_launches import Counted  # noqa: E402
from test_kernels_lists import all_at_once  # noqa: E402

from horovod_compress.kernels import device  # noqa: E402
from horovod_compress.kernels.device import DeviceArray, wait_for  # noqa: E402

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = [
    "dgc:ratio=0.05",
    pytest.param("dgc:ratio=0.05,momentum=0", marks=pytest.mark.extended),
    pytest.param("dgc:ratio=0.05,masking=false,clip_norm=1", marks=pytest.mark.extended),
    # Goes dense.
    "dgc:ratio=1",
    pytest.param("topk:ratio=0.05,values=2bit", marks=pytest.mark.extended),
    "topk:k=3,chunk=64,decay=0.9",
    "adacomp",
    "variance",
    pytest.param("variance:tau=0.1", marks=pytest.mark.extended),
    "maxnorm:norm=l2",
    pytest.param("maxnorm:k=50", marks=pytest.mark.extended),
    pytest.param("maxnorm:k=50,unbiased=true", marks=pytest.mark.extended),
    pytest.param("multiscale", marks=pytest.mark.extended),
    "bf16",
    "fp16",
    "none",
]


def on_device(array):
    return DeviceArray(torch.from_numpy(array.copy()).to(WHERE))


def shapes(tensors):
    """Of tensors of a few sizes, some of which are not compressed."""
    return {
        f"t{i}": [(40, 50), (7,), (64, 3, 3, 3), (1100,), (90, 30)][i % 5] for i in range(tensors)
    }


def mean_there(carriers):
    """The mean of ranks' carriers, for each where it is."""
    mean = mean_of([np.asarray(carrier) for carrier in carriers])
    return [mean if isinstance(carrier, np.ndarray) else on_device(mean) for carrier in carriers]


def run(exchanges, flat, reduced=mean_there):
    """A step of ranks in one process. flat[rank] = {name: array}, which hold the results
    afterwards."""
    carriers = [
        {name: exchange.submit(name, grad) for name, grad in named.items()}
        for exchange, named in zip(exchanges, flat)
    ]
    for _ in itertools.zip_longest(*(exchange.rounds() for exchange in exchanges)):
        pass
    for name in flat[0]:
        for exchange, result in zip(exchanges, reduced([named[name] for named in carriers])):
            exchange.finish(name, result, now=False)


def steps_of(spec, grads, where, transport=Loopback):
    """[{name: result} of each rank] of each step, and their states. grads[step][rank] = {name:
    array}."""
    exchanges = make_ranks(
        get_compressor(spec),
        {name: grad.shape for name, grad in grads[0][0].items()},
        transport.group(len(grads[0])),
    )
    results = []
    for ranks in grads:
        flat = [{name: where(grad.reshape(-1)) for name, grad in named.items()} for named in ranks]
        run(exchanges, flat)
        results.append([{name: np.asarray(grad) for name, grad in named.items()} for named in flat])
    return results, [exchange.state_dict()["tensors"] for exchange in exchanges]


def gradients(tensors, steps=3, seed=0, ranks=2):
    rng = np.random.default_rng(seed)
    return [
        [
            {
                n: rng.standard_normal(shape).astype(np.float32)
                for n, shape in shapes(tensors).items()
            }
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def assert_same(mine, its):
    if isinstance(its, dict):
        assert mine.keys() == its.keys()
        for key in its:
            assert_same(mine[key], its[key])
    elif isinstance(its, (list, tuple)):
        assert len(mine) == len(its)
        for pair in zip(mine, its):
            assert_same(*pair)
    else:
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))


@kernel_arguments.native_only
@pytest.mark.parametrize("spec", SPECS)
def test_steps_of_many_tensors_are_those_on_the_host(spec):
    grads = gradients(5)
    # Of one tensor on one rank: the step counts for nobody.
    grads[1][0]["t2"][0] = np.inf
    assert_same(steps_of(spec, grads, on_device), steps_of(spec, grads, np.copy))


@kernel_arguments.native_only
@pytest.mark.parametrize(
    "spec, ranks",
    [
        ("dgc:ratio=0.05", 3),
        pytest.param("dgc:ratio=0.05,momentum=0", 1, marks=pytest.mark.extended),
        pytest.param("topk:ratio=0.3,min_numel=0", 2, marks=pytest.mark.extended),
        pytest.param("multiscale", 3, marks=pytest.mark.extended),
    ],
)
def test_payloads_that_stay_on_a_device_make_the_same(spec, ranks):
    """As of ranks over NCCL: where a tensor is all zeros, or not finite on one rank, too."""
    grads = gradients(5, 4, ranks=ranks)
    grads[1][-1]["t2"][0] = np.nan
    for named in grads[2]:
        named["t3"][...] = 0
    with np.errstate(invalid="ignore"):
        found = steps_of(spec, grads, on_device, OnDevice)
    assert_same(found, steps_of(spec, grads, np.copy))


@pytest.mark.parametrize(
    "where, transport",
    [(on_device, OnDevice), pytest.param(None, Loopback, marks=pytest.mark.extended)],
)
def test_low_rank_products_on_a_device_are_the_hosts_to_rounding(where, transport):
    """Alike on all ranks, to the last bit: also from step to step on another device, with a tensor
    on the host, where one is not finite on a rank, has fewer directions than vectors, or is zero.
    """
    spec, grads = "powersgd:rank=3,min_numel=0,min_rate=0", gradients(5, 5)
    grads[1][1]["t2"][0] = np.inf
    for named in grads[2] + grads[3]:
        named["t0"][...] = 0
        named["t4"][...] = np.arange(30)
    places = itertools.chain.from_iterable(
        2 * [[on_device, np.copy][(step + tensor) % 3 == 1] for tensor in range(5)]
        for step in range(5)
    )
    found, states = steps_of(spec, grads, where or (lambda grad: next(places)(grad)), transport)
    expected, its = steps_of(spec, grads, np.copy)
    for ranks, others in zip(found, expected):
        for name in ranks[0]:
            np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
            np.testing.assert_allclose(ranks[0][name], others[0][name], atol=1e-3)
    for mine, other in zip(states, its):
        for name in mine:
            for key in mine[name]:
                np.testing.assert_allclose(mine[name][key], other[name][key], atol=1e-3)


class Told(OnDevice):
    """Notes what is gathered, and where."""

    def allgather(self, name, payload):
        vars(self).setdefault("told", []).append((name, isinstance(payload, np.ndarray)))
        return super().allgather(name, payload)


def test_ranks_whose_steps_differ_gather_at_one_place():
    """Where a learning rate is 0 on one rank only, and where a tensor is empty."""
    shapes, rng = {"a": (30, 40), "b": (20, 40), "empty": (0, 40)}, np.random.default_rng(0)
    exchanges = make_ranks(get_compressor("dgc:ratio=0.05,min_numel=0"), shapes, Told.group(2))
    for rank, exchange in enumerate(exchanges):
        for name, shape in shapes.items():
            grad = on_device(rng.standard_normal(np.prod(shape)).astype(np.float32))
            exchange.submit(name, grad, lr=0.0 if (rank, name) == (0, "a") else 0.1)
    for _ in itertools.zip_longest(*(exchange.rounds() for exchange in exchanges)):
        pass
    first, second = (exchange.transport.told for exchange in exchanges)
    assert first == second and not any(on_cpu for _, on_cpu in first)


def test_what_others_wait_for_is_sent_where_results_are_interrupted():
    exchange, _ = make_ranks(get_compressor("topk:ratio=0.05"), {"a": (30, 40)}, Told.group(2))
    exchange.transport.gathers_on_device = False
    exchange.submit("a", on_device(np.ones(1200, np.float32)))
    exchange.fail_tensor("a")
    assert len(exchange.transport.told) == 1
    exchange.end_step()
    assert not exchange.succeeded


@pytest.mark.parametrize(
    "word, said", [(0, "another compressor"), (1, "another compressor"), (2, "of step 8")]
)
def test_a_frame_that_is_not_as_it_must_be_is_an_error_with_its_rank(word, said, monkeypatch):
    """At the end of the step at the latest. Nothing of it is in the results, and nothing that was
    to be sent is lost."""
    grads = gradients(1)[0]
    exchanges = make_ranks(
        get_compressor("topk:ratio=0.05"), {"t0": grads[0]["t0"].shape}, OnDevice.group(2)
    )
    allgather = exchanges[1].transport.allgather

    def damaging(name, array):
        array.tensor[word] ^= 8
        return allgather(name, array)

    monkeypatch.setattr(exchanges[1].transport, "allgather", damaging)
    flat = [{"t0": on_device(named["t0"].reshape(-1))} for named in grads]
    run(exchanges, flat)
    for exchange, its, named in zip(exchanges, flat, grads):
        assert not its["t0"].any()
        # To the second rank all others look wrong.
        with pytest.raises(WireError, match=said if exchange is exchanges[0] else "rank"):
            exchange.end_step()
        assert not exchange.succeeded
        residual = exchange.arrays()["t0"]["residual"]
        np.testing.assert_array_equal(np.asarray(residual), named["t0"].reshape(-1))


@kernel_arguments.native_only
@pytest.mark.parametrize("spec", ["dgc:ratio=0.05,clip_norm=1", "adacomp", "fp16"])
def test_places_of_a_group_may_differ(spec):
    grads, places = gradients(5, 2), itertools.cycle([on_device, np.copy])
    found = steps_of(spec, grads, lambda grad: next(places)(grad))
    assert_same(found, steps_of(spec, grads, np.copy))


def test_numbers_beyond_float16_are_counted_as_on_the_host():
    counted = []
    for where in (on_device, np.copy):
        (exchange,) = make_ranks(get_compressor("fp16"), shapes(3), Loopback.group(1))
        for large in (1e5, np.inf, 60000, -1e5):
            grads = {name: np.ones(np.prod(shape), np.float32) for name, shape in shapes(3).items()}
            grads["t1"][3] = large
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run([exchange], [{name: where(grad) for name, grad in grads.items()}], reduced=list)
        exchange.end_step()
        counted.append([exchange.stats()[key] for key in ("overflows", "steps_undone")])
    assert counted == [[2, 3], [2, 3]]


@pytest.mark.skipif(WHERE != "cuda", reason="there is no GPU here")
def test_a_stream_waits_for_others_cuda():
    """The later of two streams finds what the other has not written when a kernel is called."""
    array, streams = (
        on_device(np.zeros(1 << 20, np.float32)),
        [torch.cuda.default_stream(), torch.cuda.Stream()],
    )
    for number, (first, second) in enumerate(
        [streams, streams[::-1], [torch.cuda.Stream(), streams[1]]], 1
    ):
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(100_000_000)
            array.fill(number)
            written = array.stream()
        with torch.cuda.stream(second):
            wait_for({written, array.stream()}, array.tensor.device)
            assert list(array.kernels.max_abs([array])) == [number]


@kernel_arguments.native_only
@pytest.mark.parametrize("spec", ["dgc:ratio=0.05", "maxnorm", "powersgd"])
def test_what_is_measured_on_a_device_sends_the_same(spec):
    found = [
        measure(get_compressor(spec), [{"t": np.eye(40, 50, dtype=np.float32)}], 2, 1, place=place)
        for place in (HERE, Place(on_device, lambda: None))
    ]
    for key in ("exchanged", "operations"):
        assert found[0][key] == found[1][key]
    # Of products, to rounding.
    assert found[0]["error"] == pytest.approx(found[1]["error"], rel=1e-9)


def arguments_of(name, data):
    """(arguments, names of those that are on the device)."""
    a = Arguments(data)
    if name == "encode_topk":
        return encode_topk(data, a, data.draw(MOMENTA)), ["grad", "base", "u", "v"]
    arrays = {
        "encode_variance": ["grad", "r", "v"],
        "encode_adacomp": ["grad", "residual"],
        "apply_momentum": ["out", "u", "new_u"],
        "quantize": ["x"],
        "encode_scales": ["x"],
    }
    given = getattr(kernel_arguments, name)(a)
    if name == "quantize":
        # As quantizers hand them to a device.
        given.update(x=np.clip(given["x"], -given["w"], given["w"]), clip=float(given["w"][0]))
    if name == "encode_scales":
        given.update(x=np.nan_to_num(given["x"]))
    return given, arrays.get(name, ["out"])


@pytest.mark.parametrize(
    "name",
    [
        "encode_topk",
        "encode_variance",
        "encode_adacomp",
        "decode_add_sparse",
        "decode_add_bf16",
        "apply_momentum",
        "quantize",
        "dequantize",
        "encode_scales",
    ],
)
@examples(10)
@given(data=st.data())
def test_tensors_of_a_list_are_as_each_alone(name, data):
    """With options of their own, in any order: as each is on the CPU, which test_device.py compares
    one tensor on a device with."""
    together, alone = [], []
    for _ in range(data.draw(st.integers(2, 4))):
        given, arrays = arguments_of(name, data)
        for calls, where in ((together, on_device), (alone, np.copy)):
            calls.append(
                {
                    key: where(value) if key in arrays and value is not None else value
                    for key, value in given.items()
                }
            )
    with np.errstate(all="ignore"):
        expected = [getattr(cpu, name)(**call) for call in alone]
        assert_same(list(all_at_once(device, name, together)), expected)
    assert_same(together, alone)


@pytest.mark.parametrize(
    "name, body",
    [
        (
            "decode_add_sparse",
            cpu.encode_sparse(np.uint32([3]), np.ones(1, np.float32), kind="fp32").body,
        ),
        ("decode_add_bf16", cpu.encode_bf16(np.ones(10, np.float32)).body),
    ],
)
def test_a_bad_body_is_refused_before_anything_is_added(name, body):
    outs = [on_device(np.zeros(10, np.float32)) for _ in range(2)]
    with pytest.raises(ValueError):
        getattr(device, name)(outs, [body, body[:-1]], scale=1.0)
    assert not any(out.any() for out in outs)
    assert list(getattr(device, name)(outs, [body, body], scale=1.0)) == [True, True]
    assert all(out.any() for out in outs)


@pytest.mark.parametrize("spec", ["maxnorm", pytest.param("adacomp", marks=pytest.mark.extended)])
def test_launches_come_early_where_much_waits(spec, monkeypatch):
    """Long before the last gradient comes, payloads travel; and results are the same."""
    grads = gradients(7)
    expected = steps_of(spec, grads, on_device)
    monkeypatch.setattr(group, "MOST_ON_DEVICE", 3000)
    (one,) = make_ranks(get_compressor(spec), shapes(7), Loopback.group(1))
    with monkeypatch.context() as patch, Counted(patch.setattr) as counted:
        for name, grad in gradients(7)[0][0].items():
            one.submit(name, on_device(grad.reshape(-1)))
    assert counted.found["launches"]
    assert_same(steps_of(spec, grads, on_device), expected)


@pytest.mark.parametrize("spec", ["dgc:ratio=0.05", "adacomp", "variance", "maxnorm"])
def test_a_step_that_is_given_up_leaves_nothing_behind(spec):
    """Whether its calls were made or not, on one rank."""
    grads = gradients(5, 3)
    (expected,) = make_ranks(get_compressor(spec), shapes(5), Loopback.group(1))
    (found,) = discardable(make_ranks(get_compressor(spec), shapes(5), Loopback.group(1)))
    for number, (ranks, _) in enumerate(grads):
        for exchange in (expected, found):
            run(
                [exchange],
                [{name: on_device(grad.reshape(-1)) for name, grad in ranks.items()}],
                reduced=list,
            )
        flat = {name: on_device(grad.reshape(-1)) for name, grad in ranks.items()}
        for name in flat:
            found.submit(name, flat[name])
        if number:
            found.flush()
        found.rollback()
    mine, its = (exchange.state_dict()["tensors"] for exchange in (found, expected))
    assert_same(mine, its)


@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0.05,min_numel=0",
        "adacomp:min_numel=0",
        "variance:min_numel=0,alpha=0.1,error_feedback=true",
    ],
)
@pytest.mark.parametrize("most", [1, 1 << 24])
def test_a_transport_that_fails_for_one_group_loses_nothing_of_the_others(spec, most, monkeypatch):
    """Nor does a step that is given up: its gradients are in the residuals."""
    monkeypatch.setattr(group, "MOST_ON_DEVICE", most)
    (exchange,) = make_ranks(get_compressor(spec), shapes(5), Loopback.group(1))
    grads = gradients(5)[0][0]
    allgather = exchange.transport.allgather

    def failing(name, array):
        if name.endswith("t1"):
            raise OSError("the network is gone")
        return allgather(name, array)

    monkeypatch.setattr(exchange.transport, "allgather", failing)
    for name, grad in grads.items():
        exchange.submit(name, on_device(grad.reshape(-1)))
    with pytest.raises(OSError) if most == 1 else contextlib.nullcontext():
        exchange.flush()
    exchange.rollback()
    for name, grad in grads.items():
        tensor = exchange.tensors[name]
        np.testing.assert_array_equal(
            np.asarray(exchange.arrays()[name][tensor.compressor.traits.accumulator]),
            grad.reshape(-1),
        )


def test_one_damaged_payload_keeps_no_other_result_back(monkeypatch):
    """But those of its group."""
    monkeypatch.setattr(group, "MOST_ON_DEVICE", 1)
    (exchange,) = make_ranks(
        get_compressor("topk:ratio=0.05,min_numel=0"), shapes(4), Loopback.group(1)
    )
    allgather, flat = (
        exchange.transport.allgather,
        {name: on_device(grad.reshape(-1)) for name, grad in gradients(4)[0][0].items()},
    )

    def damaging(name, array):
        if name.endswith("t1"):
            array = array.copy()
            array[30] ^= 1
        return allgather(name, array)

    monkeypatch.setattr(exchange.transport, "allgather", damaging)
    carriers = {name: exchange.submit(name, grad) for name, grad in flat.items()}
    for name in flat:
        with pytest.raises(WireError) if name == "t1" else contextlib.nullcontext():
            exchange.finish(name, carriers[name])
    assert list(exchange.open_tensors()) == ["t1"] and all(
        grad.any() for name, grad in flat.items() if name != "t1"
    )
    exchange.rollback()
    assert not exchange.succeeded and exchange.stats()["decode_seconds"] > 0
