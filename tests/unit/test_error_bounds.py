"""What a normal tensor loses in 8 and in 16 bits. The bounds are those of hivemind's own tests."""

import numpy as np
import pytest

import horovod_compress as hc

EIGHT_BITS = [
    "maxnorm:bits=7,min_numel=0",
    "qsgd:bits=7,norm=max,min_numel=0",
    "topk:dense=int8,exclude=*",
]
SIXTEEN_BITS = ["fp16", "topk:dense=fp16,exclude=*", "topk:ratio=1,values=fp16,min_numel=0"]
KINDS = [(spec, 8e-4) for spec in EIGHT_BITS] + [(spec, 5e-8) for spec in SIXTEEN_BITS]


@pytest.mark.parametrize("spec, most", KINDS)
def test_the_mean_squared_error_of_a_normal_tensor(spec, most):
    tensor = np.random.default_rng(0).standard_normal((128, 128, 64), np.float32)
    error = np.square(
        hc.simulate(spec, [[{"t": tensor}]]).mean[0]["t"] - tensor, dtype=np.float64
    ).mean()
    assert 0 < error < most
