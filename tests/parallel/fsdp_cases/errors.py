"""What is refused, by name and with the way out."""

import os
import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from checks import raises, registry
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from horovod_compress import MismatchError, fsdp

from .training import (
    REPLICAS,
    adamw,
    batches,
    cut,
    loss_of,
    mesh_of,
    model_of,
    modules_of,
    sgd,
    sharded,
    train,
)

CASES, case = registry()


@case(2, 4)
def models_that_cannot_be_served_are_named():
    mesh = mesh_of(REPLICAS)
    group = mesh["replicate"]

    def refused(model, *words, kind=ValueError, spec="topk", **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(kind, *words):
            fsdp.compress(model, optimizer, spec, **{"replicate_group": group, **options})

    refused(model_of(), "fully_shard(model, mesh=…) first", kind=TypeError)
    refused(DistributedDataParallel(model_of()), "ddp.compress", kind=TypeError)
    old = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused(old, "FSDP1", kind=TypeError)
    refused(cut(model_of(), mesh), "mesh['shard'] alone", "replicate_group=mesh['replicate']")
    offloaded = cut(model_of(), mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    refused(offloaded, "CPUOffloadPolicy")
    hooked = cut(model_of(), mesh["shard"])
    modules_of(hooked)[0].set_all_reduce_hook(lambda _: None)
    refused(hooked, "all-reduce hook already")
    served = cut(model_of(), mesh["shard"])
    fsdp.compress(served, sgd(served), "none", replicate_group=group)
    refused(served, "all-reduce hook already", "switch(spec)")
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        apart = cut(model_of(), mesh["shard"])
        fsdp.compress(apart, sgd(apart), "none", replicate_group=group)
    of_hosts = [its for its in said if "over several hosts" in str(its.message)]
    assert bool(of_hosts) == (mesh["shard"].size() > 1)
    several = nn.Linear(24, 24)
    other = FSDPMeshInfo(mesh=mesh["replicate"], shard_mesh_dim=0)
    by_rank = {1: ShardPlacementResult(Shard(0), other)}
    fully_shard(several, mesh=mesh["shard"], shard_placement_fn=lambda p: by_rank.get(p.dim()))
    refused(several, "several meshes", "fsdp.UpdateOptimizer")
    sparse = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    refused(cut(sparse, mesh["shard"], whole=True), "sparse=False")
    complex_one = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4).to(torch.complex64)})
    for part in complex_one.values():
        fully_shard(part, mesh=mesh["shard"])
    refused(complex_one, "b.weight is complex")
    if mesh["shard"].size() > 1:
        for wrong in (None, mesh["shard"]):
            refused(cut(model_of(), mesh["shard"]), "mesh['replicate']", replicate_group=wrong)
        refused(cut(model_of(), mesh["shard"]), "clip_grad_norm_", spec="dgc:clip_norm=1")
        refused(cut(model_of(), mesh["shard"]), "hosts=true", spec="topk:hosts=true")
    refused(cut(model_of(), mesh["shard"]), "one dimension", replicate_group=mesh)
    for spec, word in (
        ("topk:transport=mpi", "transport=mpi"),
        ("variance:moments=microbatch", "moments=microbatch"),
        ("variance:moments=per_sample", "moments=per_sample"),
        ("topq", "topq"),
    ):
        refused(cut(model_of(), mesh["shard"]), word, spec=spec)
    for passes in (0, 1.5, True):
        model = cut(model_of(), mesh["shard"])
        refused(model, "backward_passes_per_step", backward_passes_per_step=passes)
    model = cut(model_of(), mesh["shard"])
    with raises(ValueError, "fsdp.compress"):
        fsdp.compress(model, fsdp.AdamW(model.parameters()), "none", replicate_group=group)
    with raises(ValueError, "no parameter of the model"):
        fsdp.compress(model, sgd(model_of()), "none", replicate_group=group)
    with raises(TypeError, "torch optimizer"):
        fsdp.compress(model, "adam", "none", replicate_group=group)
    compression = fsdp.compress(model, adamw(model), "none", replicate_group=group)
    with raises(ValueError, "moments=microbatch"):
        compression.switch("variance:moments=microbatch")


@case(4)
def replicas_that_differ_are_named():
    replica = mesh_of(REPLICAS)["replicate"].get_local_rank()
    model, optimizer, _ = sharded("topk", model=model_of(seed=replica))
    with raises(MismatchError, "words.weight.values", "seed all ranks alike"):
        train(model, optimizer, batches(1))
    with raises(RuntimeError, "have not exchanged"):
        optimizer.step()
    model, optimizer, _ = sharded(f"topk:ratio={0.1 + 0.1 * replica}")
    with raises(MismatchError, "ratio"):
        train(model, optimizer, batches(1))
    model, optimizer, _ = sharded("topk", optimizer=lambda model: sgd(model, lr=0.1 + replica))
    with raises(MismatchError, "lr"):
        train(model, optimizer, batches(1))


@case(4)
def replicas_of_other_shards_are_named():
    """A group of which each rank has another shard, and none the same mesh."""
    mesh = mesh_of(REPLICAS)
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    model = cut(model_of(), mesh["shard"])
    group = crossed[0] if dist.get_rank() in (0, 3) else crossed[1]
    compression = fsdp.compress(model, sgd(model), "topk", replicate_group=group)
    with raises(MismatchError, "shard", "mesh['replicate']"):
        loss_of(model, next(batches(1))).backward()
    assert compression.stats()["steps"] == 0


@case(4)
def steps_that_cannot_be_right_are_named():
    data = list(batches(3))
    model, optimizer, _ = sharded("topk", backward_passes_per_step=2)
    loss_of(model, data[0]).backward()
    with raises(RuntimeError, "1 of 2 backward passes"):
        optimizer.step()
    model, optimizer, _ = sharded("topk")
    model.set_requires_all_reduce(False)
    loss_of(model, data[0]).backward()
    with raises(RuntimeError, "set_requires_all_reduce"):
        optimizer.step()
    model, optimizer, _ = sharded("topk")
    train(model, optimizer, data[:1])
    model.frozen.requires_grad_(True)
    with raises(ValueError, "frozen.weight", "was frozen"):
        train(model, optimizer, data[:1])
    # dgc's momentum is that of the optimizer that was given, also after a step that was skipped.
    model, optimizer, _ = sharded("dgc")
    for skipped in data[:2]:
        optimizer.zero_grad()
        loss_of(model, skipped).backward()
    other = sgd(model)
    with raises(RuntimeError, "another optimizer has parameters"):
        train(model, other, data[1:2])
    model, optimizer, _ = sharded("topk")
    model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    with raises(ValueError, "load_state_dict(assign=True)"):
        loss_of(model, data[0]).backward()
    model, optimizer, _ = sharded("topk")
    model.scale.register_post_accumulate_grad_hook(lambda param: None)
    with raises(ValueError, "scale has a hook behind its gradient"):
        loss_of(model, data[0]).backward()


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = model_of().blocks[0]

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=True)


@case(2)
def passes_within_passes_are_named():
    mesh = mesh_of(REPLICAS)
    model = nn.Sequential(nn.Linear(24, 24), Reentrant())
    fully_shard(model[1].inside, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    fsdp.compress(model, sgd(model), "none", replicate_group=mesh["replicate"])
    with raises(RuntimeError, "use_reentrant=False"):
        model(torch.ones(2, 4, 24)).sum().backward()


@case(2)
def gradients_outside_of_a_backward_pass_are_named():
    """As pipelines reduce them."""
    model, optimizer, _ = sharded("none")
    train(model, optimizer, batches(1))
    model.set_requires_gradient_sync(False)
    loss_of(model, next(batches(1))).backward()
    model.set_requires_gradient_sync(True)
    with raises(RuntimeError, "fsdp.UpdateOptimizer"):
        for module in modules_of(model):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group.post_backward()


@case(4)
def no_horovod_is_needed():
    assert sys.modules["horovod"] is None
