"""Launches, copies and waits of steps on a device, whatever the number of tensors."""

import collections

import numpy as np
import pytest
from ranks import OnDevice

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from horovod_compress import get_compressor  # noqa: E402
from horovod_compress.engine.lockstep import make_ranks  # noqa: E402
from horovod_compress.engine.recording import Recorder  # noqa: E402
from horovod_compress.kernels.device import DeviceArray, launches  # noqa: E402

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
# Of torch's functions those for which the CPU waits for a GPU.
WAITING = {"__bool__", "__float__", "__int__", "cpu", "item", "nonzero", "numpy", "tolist"}


class Counted(torch.overrides.TorchFunctionMode):
    """Counts launches, copies to the device, copies back, and waits, within it."""

    def __init__(self, patch):
        super().__init__()
        self.found, landing = collections.Counter(), launches.landing

        def landing_counted(tensor):
            self.found["copies back"] += 1
            with torch._C.DisableTorchFunction():
                landed = landing(tensor)

            def wait():
                self.found["waits"] += 1
                with torch._C.DisableTorchFunction():
                    return landed()

            return wait

        patch(launches, "landing", landing_counted)
        for name, what in {"launch": "launches", "copied": "copies to it"}.items():
            patch(launches, name, self._counting(what, getattr(launches, name)))

    def _counting(self, what, function):
        def call(*arguments, **named):
            self.found[what] += 1
            with torch._C.DisableTorchFunction():
                return function(*arguments, **named)

        return call

    def __torch_function__(self, function, types, args=(), kwargs=None):
        # As DeviceArray copies itself; others name a device, which is the CPU's here.
        copied = function.__name__ == "to" and args[1:2] == ("cpu",)
        self.found["waits"] += copied or function.__name__ in WAITING
        return function(*args, **(kwargs or {}))


def steps_of(spec, tensors, patching, gathers_on_device=False, recorded=False):
    """Of a second step, whose tables are on the device, what is counted in backward, until all is
    sent, until results are there, and until the step has ended."""
    for cached in (launches._blocks, launches._table):
        cached.cache_clear()
    (transport,) = OnDevice.group(1)
    transport.gathers_on_device = gathers_on_device
    shapes = {f"t{i}": [(1100,), (40, 50), (7,)][i % 3] for i in range(tensors)}
    (exchange,) = make_ranks(get_compressor(spec), shapes, [transport])
    if recorded:
        exchange.features["record"] = Recorder(exchange, lambda record: None, every=1)
    grads = {
        name: DeviceArray(torch.zeros(int(np.prod(its)), device=WHERE))
        for name, its in shapes.items()
    }
    carriers, rng = {}, np.random.default_rng(0)
    parts = [
        lambda: carriers.update({name: exchange.submit(name, grads[name]) for name in grads}),
        exchange.flush,
        lambda: [exchange.finish(name, carriers[name], now=False) for name in grads],
        exchange.end_step,
    ]
    for _ in range(2):
        found = []
        for grad in grads.values():
            grad.tensor.copy_(torch.from_numpy(rng.standard_normal(grad.size).astype(np.float32)))
        with patching.context() as patch, Counted(patch.setattr) as counted:
            for part in parts:
                part()
                found.append(dict(+counted.found))
                counted.found.clear()
    return found


QUICK = {"dgc", "adacomp", "maxnorm", "fp16"}
# By spec: launches in backward, after it until all is sent, and for results; waits after backward.
COUNTS = {
    "dgc": ((6, 0, 3), 1),
    "topk": ((6, 0, 2), 1),
    "topk:values=2bit": ((6, 1, 2), 1),
    "topk:k=3,chunk=64": ((1, 1, 2), 2),
    "adacomp": ((4, 1, 2), 2),
    "variance": ((1, 2, 2), 2),
    "maxnorm": ((1, 1, 2), 0),
    "maxnorm:norm=l2": ((0, 1, 2), 0),
    "multiscale": ((1, 3, 3), 0),
    "powersgd:min_numel=0,min_rate=0": ((2, 7, 3), 0),
    # Dense, with a residual.
    "powersgd:start_step=9,min_numel=0,min_rate=0": ((1, 0, 1), 0),
    "bf16": ((1, 0, 1), 2),
    "fp16": ((0, 0, 2), 0),
    "none": ((0, 0, 1), 0),
}


@pytest.mark.parametrize(
    "spec",
    [pytest.param(its, marks=[] if its in QUICK else pytest.mark.extended) for its in COUNTS],
)
def test_backward_never_waits_for_a_device(spec, monkeypatch):
    """Nor do results: whether they are finite is read when the step ends. What is counted does not
    grow with the tensors."""
    launched, waits = COUNTS[spec]
    few, many = steps_of(spec, 3, monkeypatch), steps_of(spec, 6, monkeypatch)
    # Tables are kept by where arrays lie, which may be elsewhere in the second step.
    copied = [sum(part.pop("copies to it", 0) for part in its) for its in (few, many)]
    assert few == many and max(copied) <= 8, copied
    backward, sent, brought, ended = few
    assert tuple(part.get("launches", 0) for part in (backward, sent, brought)) == launched
    assert not backward.get("waits") and not brought.get("waits")
    assert sent.get("waits", 0) == waits and ended == {"waits": brought["copies back"]}


@pytest.mark.parametrize("spec", ["dgc:ratio=1", "topk:ratio=1"])
def test_dense_steps_do_not_wait(spec, monkeypatch):
    """The gradient that is not finite is marked on the device."""
    exchanges = make_ranks(get_compressor(spec), {"a": (40, 50), "b": (30, 50)}, OnDevice.group(2))
    for number in (1, np.inf):
        grads = [torch.ones(2000, device=WHERE), torch.ones(1500, device=WHERE)]
        grads[0][5] = number
        with monkeypatch.context() as patch, Counted(patch.setattr) as counted:
            carriers = [
                exchange.submit(name, DeviceArray(grad.clone()))
                for name, grad in zip("ab", grads)
                for exchange in exchanges
            ]
        assert not counted.found["waits"]
        first, *_, other = (np.asarray(carrier) for carrier in carriers)
        assert first.size == 2000 and np.isfinite(other).all()
        assert np.isfinite(first).all() == (number == 1)
        for exchange in exchanges:
            exchange.rollback()


def test_norms_of_a_recorded_step_are_read_when_it_ends(monkeypatch):
    backward, *_ = steps_of("dgc", 3, monkeypatch, recorded=True)
    assert backward["copies back"] > 1 and not backward.get("waits")


def test_where_ranks_gather_on_the_device_nothing_waits(monkeypatch):
    found = steps_of("dgc", 3, monkeypatch, gathers_on_device=True)
    assert found == steps_of("dgc", 6, monkeypatch, gathers_on_device=True)
    assert tuple(part.get("launches", 0) for part in found[:3]) == (6, 0, 3)
    assert not any(part.get("waits") for part in found[:3])
