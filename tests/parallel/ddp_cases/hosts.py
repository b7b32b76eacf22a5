"""hosts=true on two machines of two ranks each: what the same ranks give in one process."""

import numpy as np
import torch
import torch.distributed as dist
from checks import raises, registry
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp

from .told import assert_simulated
from .training import (
    assert_replicas_identical,
    batches,
    everywhere,
    flat,
    model_of,
    sgd,
    train,
    trained,
    wrapped,
)
from .updates import updating

CASES, case = registry()
LEAST = 100
SPECS = tuple(
    f"{start}min_numel={LEAST},hosts=true"
    for start in (
        "topk:ratio=0.05,",
        "dgc:ratio=0.05,momentum=0.9,",
        "dgc:schedule=0/1+2/0.05,momentum=0.9,",
        "adacomp:",
        "variance:",
        "efsignsgd:",
    )
)


def assert_same(found, expected, what):
    """Bit for bit, but for what is added up over all four ranks, in an order that is not told."""
    tolerance = 1e-5 if expected.size < LEAST else 0
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=what)


@case(4)
def hosts_give_what_they_give_in_one_process():
    """Gradients, bytes and residuals. Steps that go dense are among them."""
    for spec in SPECS:
        assert_simulated(spec, assert_same, local_size=2)


@case(4)
def hosts_train_resume_and_switch():
    spec = f"dgc:ratio=0.05,min_numel={LEAST},hosts=true"
    model, optimizer, compression = wrapped(spec)
    train(model, optimizer, batches(4))
    state = compression.state_dict()
    portable = compression.state_dict(portable=True)
    for switched in (f"topk:ratio=0.05,min_numel={LEAST}", "none", spec):
        compression.switch(switched)
        train(model, optimizer, batches(2))
        assert_replicas_identical(model)
    for saved in (state, portable):
        model, optimizer, compression = wrapped(spec)
        compression.load_state_dict(saved)
        train(model, optimizer, batches(2))
        assert_replicas_identical(model)
    model, optimizer = updating(f"topk:ratio=0.05,min_numel={LEAST},hosts=true")
    train(model, optimizer, batches(3))
    assert_replicas_identical(model)


@case(4)
def machines_are_those_of_the_launcher():
    compression = trained(SPECS[0], steps=2)[1]
    machine = compression._ranks.machine
    found = everywhere(torch.tensor([machine.local, machine.size])).tolist()
    assert found == [[0, 2], [1, 2]] * 2, found
    assert machine.places == [0, 1, 0, 1]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model = DDP(model_of(), process_group=pair)
    with raises(ValueError, "hosts=true", "all ranks of a machine", "process_group"):
        ddp.compress(model, sgd(model), SPECS[0])
    assert torch.isfinite(flat(model)).all()
