"""Every algorithm gives what `simulate` gives, which is what Horovod's ranks give, and trains."""

from functools import partial

import alike
import numpy as np
import torch
import torch.distributed as dist
from checks import registry
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import available, ddp

from .told import Holder, assert_simulated, told
from .training import DENSE, assert_close, assert_replicas_identical, trained

CASES, case = registry()
SPLIT = ("topk:ratio=0.05,exchange=split", "dgc:ratio=0.05,momentum=0.9,exchange=split")


@case(2, 3)
def every_algorithm_gives_what_simulate_gives():
    size = dist.get_world_size()
    for spec in sorted({*alike.SPECS, *SPLIT, *available()} - {"dgc"}):
        # The order in which three ranks are added up is not told.
        tolerance = 0 if size == 2 else (2e-3 if "fp16" in spec else 1e-5) * size
        assert_simulated(spec, partial(assert_near, tolerance), state=size == 2)


@case(2)
def a_group_thaws_as_it_was_frozen():
    """By a rate of 0, one of two groups. The way of its next steps is not longer than plain
    SGD's."""

    def way(spec, momentum):
        model = DDP(Holder())
        first = model.module.held["matrix"]
        others = [param for param in model.parameters() if param is not first]
        optimizer = torch.optim.SGD(
            [{"params": [first], "lr": 0.0}, {"params": others}], lr=1.0, momentum=momentum
        )
        compression = ddp.compress(model, optimizer, spec)
        for step in range(55):
            if step == 50:
                assert not first.any() and all(param.any() for param in others)
                optimizer.param_groups[0]["lr"] = 1.0
            optimizer.zero_grad()
            model(told(dist.get_rank(), 0)).backward()
            optimizer.step()
        assert_replicas_identical(model)
        return float(first.norm()), compression.stats_by_tensor()["held.matrix"]

    for momentum in (0.0, 0.9):
        plain, _ = way("none", momentum)
        for spec in ("dgc:ratio=0.01", "topk:ratio=0.01"):
            found, sent = way(spec, momentum)
            assert 0 < found <= plain, f"{spec}, momentum={momentum}: {found}, SGD's {plain}"
            # Its messages are as short as others'.
            assert sent["dense_bytes"] > 10 * sent["bytes_sent"]


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
