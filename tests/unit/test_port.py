"""The least port that docs/how-it-works.md describes, for a host without a framework, has results,
states, switches and errors as the others have them."""

import gc
import weakref

import numpy as np
import pytest
from ranks import Waiting, on_all_ranks

from horovod_compress import MismatchError, get_compressor, simulate
from horovod_compress.protocol.machine import Placement
from horovod_compress.session.bound import Bound
from horovod_compress.session.choice import Choice
from horovod_compress.session.port import Port
from horovod_compress.session.ranks import Ranks
from horovod_compress.session.session import Session


class ToyRanks(Ranks):
    """The ranks that a transport connects."""

    def __init__(self, transport):
        super().__init__(active=transport.size > 1)
        self.transport = transport

    def rank_and_size(self):
        return self.transport.rank, self.transport.size

    def placement(self):
        return Placement(self.transport.rank, self.transport.rank, local=0, size=1, even=True)

    def transport_of(self, compressor):
        return self.transport


class Toy(Bound, Port):
    """The compression of a host that has all gradients of a step at once, {name: array}."""

    def __init__(self, spec, shapes, transport):
        self.shapes, self.transport = shapes, transport
        super().__init__(Session(ToyRanks(transport), self, spec))

    def choose(self, spec):
        compressor = get_compressor(spec)
        tensors = {name: (shape, compressor) for name, shape in self.shapes.items()}
        alike = {"tensors": [[name, *shape] for name, shape in self.shapes.items()]}
        return Choice(compressor, compressor, tensors, alike)

    def means(self, gradients):
        """Takes a step; returns the means over ranks."""
        if not self._session.ranks.active:
            return gradients
        self._session.handshake()
        self._session.step_begins()
        self._session.meet()
        exchange = self._session.exchange
        results = {name: np.array(gradients[name], np.float32).ravel() for name in self.shapes}
        carriers = {name: exchange.submit(name, each) for name, each in results.items()}
        for name, carrier in carriers.items():
            carrier[:] = self.transport.allreduce(name, carrier)() / self.transport.size
        exchange.flush()
        for name, carrier in carriers.items():
            exchange.finish(name, carrier)
        return {name: each.reshape(self.shapes[name]) for name, each in results.items()}


SHAPES = {"matrix": (12, 8), "bias": (12,)}
TOPK = "topk:ratio=0.25,min_numel=0"
DGC = "dgc:momentum=0.9,ratio=0.25,min_numel=0"


@pytest.fixture
def gradients():
    """gradients[step][rank] = {name: array}."""
    rng = np.random.default_rng(0)
    return [
        [{n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()} for _ in "01"]
        for _ in range(4)
    ]


@pytest.mark.parametrize("spec", ["none", TOPK, DGC])
def test_results_are_those_of_simulate_on_all_ranks_and_states_resume(spec, gradients):
    """In the middle each rank goes on in a new port, from the old one's state."""

    def train(spec, transport):
        mine = [step[transport.rank] for step in gradients]
        port, resumed = (Toy(spec, SHAPES, transport) for _ in range(2))
        results = [port.means(each) for each in mine[:2]]
        resumed.load_state_dict(port.state_dict())
        return results + [resumed.means(each) for each in mine[2:]], resumed.stats()

    run = simulate(spec, gradients)
    for (results, stats), simulated in zip(on_all_ranks(train, [spec] * 2), run.stats):
        np.testing.assert_equal(results, run.mean)
        assert (stats["steps"], stats["residual_norm"]) == (2, simulated["residual_norm"])


def test_a_switch_hands_over_what_waits(gradients):
    def train(spec, transport):
        port, mine = Toy(spec, SHAPES, transport), [step[transport.rank] for step in gradients]
        results = [port.means(each) for each in mine[:3]]
        port.switch("none")
        return [*results, port.means(mine[3])]

    a, b = on_all_ranks(train, [TOPK] * 2)
    np.testing.assert_equal(a, b)
    for name in SHAPES:
        expected = sum(rank[name] for step in gradients for rank in step) / 2
        np.testing.assert_allclose(sum(each[name] for each in a), expected, atol=1e-5)


def test_ranks_that_differ_are_refused_on_all_of_them(gradients):
    def train(spec, transport):
        with pytest.raises(MismatchError, match="ratio"):
            Toy(spec, SHAPES, transport).means(gradients[0][transport.rank])

    on_all_ranks(train, [TOPK, "topk:ratio=0.5,min_numel=0"])


def test_a_bad_spec_is_refused():
    with pytest.raises(ValueError, match="topq"):
        Toy("topq:ratio=0.25", SHAPES, Waiting.group(1)[0])


def test_a_compression_that_is_dropped_is_gone_at_once():
    """With what it keeps of gradients, which may be as large as a model."""
    toy = Toy("topk", {"w": (40, 40)}, Waiting.group(1)[0])
    exchange = weakref.ref(toy._session.exchange)
    collects = gc.isenabled()
    gc.disable()
    try:
        del toy
        assert exchange() is None
    finally:
        if collects:
            gc.enable()
