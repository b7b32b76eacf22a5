"""Every algorithm gives what `simulate` gives, which is what Horovod's ranks give, and trains."""

from functools import partial

import alike
import numpy as np
import torch
import torch.distributed as dist
from checks import registry

from horovod_compress import available

from .told import assert_simulated
from .training import DENSE, assert_close, trained

CASES, case = registry()
SPLIT = ("topk:ratio=0.05,exchange=split", "dgc:ratio=0.05,momentum=0.9,exchange=split")


@case(2, 3)
def every_algorithm_gives_what_simulate_gives():
    size = dist.get_world_size()
    for spec in sorted({*alike.SPECS, *SPLIT, *available()} - {"dgc"}):
        # The order in which three ranks are added up is not told.
        tolerance = 0 if size == 2 else (2e-3 if "fp16" in spec else 1e-5) * size
        assert_simulated(spec, partial(assert_near, tolerance), state=size == 2)


def assert_near(tolerance, found, expected, what):
    atol = tolerance * abs(expected).max(initial=0)
    np.testing.assert_allclose(found, expected, 0, atol, equal_nan=False, err_msg=what)


@case(2, 3)
def every_algorithm_trains():
    for spec in available():
        trained(spec, steps=3)


@case(2, 3)
def dense_limits_are_plain_ddp():
    options = {
        "optimizer": lambda model: torch.optim.SGD(
            [
                {"params": list(model.parameters())[:2], "lr": 0.01, "weight_decay": 0},
                {"params": list(model.parameters())[2:]},
            ],
            lr=0.05,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-3,
        )
    }
    plain, _ = trained(None, steps=8, **options)
    assert_close(trained("none", steps=8, **options)[0], plain, 0)
    for spec in (DENSE, "topk:ratio=1,min_numel=0", "dgc:ratio=1,masking=false"):
        assert_close(trained(spec, steps=8, **options)[0], plain)
