"""Ranks in one process: what the tests of exchanges and compressors share."""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from horovod_compress.compressors import get_compressor
from horovod_compress.engine.lockstep import make_ranks
from horovod_compress.engine.step import end_steps
from horovod_compress.transport.loopback import Loopback

SHAPES = {"w": (30, 40), "x": (40, 40), "bias": (40,)}


def rescale(exchanges, loss_scale):
    """From the next step on, gradients come times a loss scale."""
    # Imported here, so that other tests do without the feature.
    from horovod_compress.engine.loss_scale import to_true_units

    for exchange in exchanges:
        exchange.expect(scale=to_true_units(loss_scale))


def discardable(exchanges):
    """The same exchanges, whose steps can be discarded."""
    # Imported here, so that other tests do without the feature.
    from horovod_compress.engine.discard import Snapshots

    for exchange in exchanges:
        exchange.features["discard"] = Snapshots()
    return exchanges


def ranks_of(spec, size=2, shapes=SHAPES, transport=Loopback):
    """The exchanges of `size` ranks."""
    return make_ranks(get_compressor(spec), shapes, transport.group(size))


class Waiting(Loopback):
    """Ranks that are driven by a thread each, and wait for one another."""

    changed = threading.Condition()

    def _post(self, key, array):
        with self.changed:
            parts = super()._post(key, array)
            self.changed.notify_all()
            return parts

    def _all(self, name, parts):
        with self.changed:
            assert self.changed.wait_for(lambda: len(parts) == self.size, timeout=600), (
                f"{name}: ranks {sorted(parts)} of {self.size} came"
            )
            return super()._all(name, parts)


def on_all_ranks(function, exchanges):
    """function(exchange, transport) of each, in a thread each; the transports connect them. Returns
    the results in rank order."""
    transports = Waiting.group(len(exchanges))
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(function, exchanges, transports))


def gradients(seed, size=2, shapes=SHAPES):
    """gradients[rank] = {name: flat array}."""
    rng = np.random.default_rng(seed)
    return [
        {n: rng.standard_normal(math.prod(s)).astype(np.float32) for n, s in shapes.items()}
        for _ in range(size)
    ]


def end_step(compressor, state, succeeded):
    """Ends the open step of a tensor that is in no exchange."""
    end_steps([SimpleNamespace(compressor=compressor, state=state)], succeeded)


def copy_of(exchange):
    return {n: {k: a.copy() for k, a in arrays.items()} for n, arrays in exchange.arrays().items()}


def assert_same(a, b):
    for name, arrays in a.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, b[name][key], err_msg=f"{name}.{key}")


shapes = st.one_of(
    st.tuples(st.integers(1, 400)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3)),
)


@st.composite
def jobs(draw, numbers_of_ranks):
    """(shapes by name, gradients[step][rank]); now and then some are not finite, but in the last
    step."""
    named = {name: draw(shapes) for name in draw(st.permutations(["a", "b.weight", "c"]))}
    ranks, rng = draw(numbers_of_ranks), np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = [
        [
            {n: rng.standard_normal(s).astype(np.float32) for n, s in named.items()}
            for _ in range(ranks)
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]
    for step in steps[:-1]:
        if draw(st.integers(0, 3)) == 0:
            draw(st.sampled_from(step))[draw(st.sampled_from(sorted(named)))].flat[0] = draw(
                st.sampled_from([np.nan, np.inf])
            )
    return named, steps


@st.composite
def any_gradients(draw, max_ranks=4):
    """gradients[step][rank][name]: values over 12 orders of magnitude, zeros among them."""
    steps, ranks = draw(st.integers(1, 6)), draw(st.integers(1, max_ranks))
    named = {f"t{i}": draw(shapes) for i in range(draw(st.integers(1, 3)))}
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    zeros = draw(st.sampled_from([0.0, 0.5, 0.99]))

    def array(shape):
        magnitude = 10.0 ** rng.uniform(-6, 6, shape)
        return (
            np.where(rng.random(shape) < zeros, 0, 1) * rng.choice([-1, 1], shape) * magnitude
        ).astype(np.float32)

    return [[{n: array(s) for n, s in named.items()} for _ in range(ranks)] for _ in range(steps)]


class OnDevice(Loopback):
    """Ranks whose messages stay on the device, as those of NCCL do."""

    reduces_on_device = gathers_on_device = True

    def allreduce(self, name, array, op="sum"):
        if isinstance(array, np.ndarray):
            return super().allreduce(name, array, op)
        parts = self._post(("reduce", name), array.tensor.clone())
        self.count(array.nbytes, array.nbytes)
        two = {"sum": "add", "max": "maximum"}[op]

        def wait():
            tensors = self._all(name, parts)
            return type(array)(functools.reduce(lambda a, b: getattr(a, two)(b), tensors))

        return wait
