"""What the tests of algorithms against their papers share: gradients drawn anew for each test, and
single encodings."""

import numpy as np
import pytest

import horovod_compress as hc
from horovod_compress.compressors.base import Step
from horovod_compress.engine.dense_policy import compressor_for

RNG = np.random.default_rng()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same, alone or among others."""
    RNG.bit_generator.state = np.random.default_rng(2024).bit_generator.state


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def alone(spec, *gradients):
    """What one rank's steps with these gradients send, and its state after them."""
    run = hc.simulate(spec, [[{"t": g}] for g in gradients])
    return [mean["t"] for mean in run.mean], run.state[0]["t"]


def payload_of(spec, gradient, state=None, step=0, size=1, squares=None):
    """(payload, compressor, state) of one tensor's encoding."""
    compressor = compressor_for(hc.get_compressor(spec), "t", gradient.shape)
    state = state or compressor.init("t", gradient.shape)
    step = Step(step, 0, size, squares=squares)
    payload = compressor.encode(gradient.reshape(-1).copy(), state, step)
    return payload, compressor, state


def decoded(compressor, body, numel):
    out = np.zeros(numel, np.float32)
    compressor.add(body, out, 1.0)
    return out
