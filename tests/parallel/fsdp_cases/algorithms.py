"""Replicas stay alike with every algorithm, and train as FSDP's own do in the dense limit."""

import alike
import torch
import torch.distributed as dist
from checks import registry
from torch.distributed.tensor import Shard

from horovod_compress import available

from .training import (
    DENSE,
    REPLICAS,
    adamw,
    assert_close,
    assert_replicas_identical,
    batches,
    loss_of,
    model_of,
    sgd,
    trained,
)

CASES, case = registry()
SPLIT = "topk:ratio=0.05,exchange=split"


@case(4, 8)
def replicas_are_identical_with_every_algorithm():
    """Whatever is compressed by itself: matrices of one row, and empty shards of what has fewer
    rows than ranks."""
    for spec in sorted({*alike.SPECS, *available(), SPLIT} - {"dgc"}):
        name, _, options = spec.partition(":")
        free = "" if name in ("none", "fp16", "bf16") else "min_numel=0," + options
        spec = f"{name}:{free or options}".rstrip(":,")
        optimizer = adamw if "momentum=" not in spec else sgd
        steps = 20 if spec.startswith(("topk:min", "dgc:min")) else 3
        model, compression = trained(spec, steps=steps, optimizer=optimizer)
        assert_replicas_identical(model)
        stats = compression.stats()
        assert stats["steps"] == steps, (spec, stats["steps"])
        assert spec == "none" or stats["ratio"] > 1 or "bits=16" in spec, (spec, stats["ratio"])


def nesterov(model):
    return sgd(model, nesterov=True, weight_decay=0.01)


def decayed(model):
    """With two groups, of which one has no momentum."""
    params = list(model.parameters())
    groups = [{"params": params[:3], "momentum": 0.0}, {"params": params[3:]}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)


@case(2, 4)
def the_dense_limit_is_fsdps_own_reduction():
    for optimizer, clip in ((nesterov, None), (decayed, None), (adamw, 0.5)):
        plain, _ = trained(None, optimizer=optimizer, clip=clip)
        specs = ["none", "topk:ratio=1,min_numel=0"] + ([] if clip else [DENSE])
        for spec in specs:
            model, _ = trained(spec, optimizer=optimizer, clip=clip)
            assert_replicas_identical(model)
            assert_close(model, plain, 1e-6 if spec != "none" else 0)


@case(4)
def the_dense_limit_in_every_wrapping():
    """The model alone, parameters kept after forward, and cut in their second dimension."""

    def second(param):
        even = param.dim() > 1 and param.shape[1] % (dist.get_world_size() // REPLICAS) == 0
        return Shard(1) if even else None

    for cutting in (
        {"whole": True},
        {"reshard_after_forward": False},
        {"shard_placement_fn": second},
    ):
        plain, _ = trained(None, steps=4, cutting=cutting)
        for spec in ("none", DENSE):
            model, _ = trained(spec, steps=4, cutting=cutting)
            assert_close(model, plain, 1e-6 if spec != "none" else 0)
            assert_replicas_identical(model)


@case(4)
def what_is_compressed_does_not_depend_on_shards():
    """So that a state can be cut anew: by the whole parameter's elements, on every rank."""
    for replicas in sorted({REPLICAS, dist.get_world_size()}):
        for spec in ("topk:min_numel=1024", "powersgd", "demo:chunk=16,k=8"):
            _, compression = trained(spec, steps=1, replicas=replicas, optimizer=adamw)
            kept = compression.state_dict()["tensors"]
            found = {name for name, arrays in kept.items() if arrays}
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, sorted(found))
            assert all(its == everywhere[0] for its in everywhere), (spec, everywhere)
            if spec.startswith("topk"):
                assert "time.weight" in found and "sometimes.weight" not in found


@case(4)
def one_rank_a_mesh_is_plain_data_parallelism():
    plain, _ = trained(None, steps=4)
    model, compression = trained("none", steps=4, replicas=dist.get_world_size())
    assert_close(model, plain, 1e-5)
    assert compression.stats()["bytes_sent"] > 0
    # Momentum counts where clip_norm is of all of the gradient.
    model, _ = trained("dgc:ratio=0.1,clip_norm=1", steps=4, replicas=dist.get_world_size())
    assert_replicas_identical(model)


@case(4)
def bfloat16_and_float64():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def bf16():
        return model_of().to(torch.bfloat16)

    plain, _ = trained(None, steps=4, model=bf16())
    model, _ = trained("none", steps=4, model=bf16())
    assert_close(model, plain, 0)
    for spec in ("topk:ratio=0.1", "maxnorm"):
        model, _ = trained(spec, steps=4, model=bf16())
        assert_replicas_identical(model)
        model, _ = trained(spec, steps=4, model=model_of().double())
        assert_replicas_identical(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain, _ = trained(None, steps=4, cutting={"mp_policy": policy})
    model, _ = trained("none", steps=4, cutting={"mp_policy": policy})
    # Replicas are added up in float32 here, and in bfloat16 there.
    assert_close(model, plain, 1e-3)


@case(4)
def a_mesh_for_tensor_parallelism_too():
    """Parameters that are cut over two meshes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from horovod_compress import fsdp

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    found = {}
    for spec in ("none", "topk:ratio=0.1,min_numel=0", "plain"):
        model = model_of()
        for block in model.blocks:
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        for block in model.blocks:
            its = (block.wide, block.narrow)
            for each in its:
                fully_shard(each, mesh=mesh["shard"])
        params = [p for block in model.blocks for p in block.wide.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.05)
        if spec != "plain":
            fsdp.compress(model, optimizer, spec, replicate_group=mesh["replicate"])
        for x in batches(4, rank=mesh["replicate"].get_local_rank()):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            if spec == "plain":
                for param in params:
                    dist.all_reduce(param.grad.to_local(), group=mesh["replicate"].get_group())
                    param.grad.div_(2)
            optimizer.step()
        found[spec] = params[0].full_tensor().detach()
    torch.testing.assert_close(found["none"], found["plain"], rtol=0, atol=1e-6)
    assert not torch.equal(found["topk:ratio=0.1,min_numel=0"], found["plain"])
