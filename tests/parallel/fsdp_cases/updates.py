"""UpdateOptimizer over shards: what each rank's optimizer adds to its shard is exchanged with the
replicas of that shard."""

import torch
from checks import raises, registry

from horovod_compress import MismatchError, ddp, fsdp

from .training import (
    REPLICAS,
    adamw,
    assert_close,
    assert_replicas_identical,
    batches,
    cut,
    loss_of,
    mesh_of,
    model_of,
    sgd,
    train,
    trained,
    whole,
)

CASES, case = registry()


def updating(spec, optimizer=adamw, replicas=REPLICAS, seed=0, **options):
    mesh = mesh_of(replicas)
    model = cut(model_of(seed=seed), mesh["shard"])
    made = fsdp.UpdateOptimizer(
        optimizer(model),
        named_parameters=model.named_parameters(),
        compression=spec,
        process_group=mesh["replicate"],
        **options,
    )
    return model, made


@case(4)
def dense_updates_train_as_fsdps_own_reduction_does():
    plain, _ = trained(None)
    model, optimizer = updating("none", sgd)
    train(model, optimizer, batches(6))
    assert_close(model, plain)
    assert_replicas_identical(model)


@case(4)
def updates_keep_replicas_alike():
    """With algorithms of each kind, clipping, several local steps, and an outer Nesterov."""

    def of_replicas(model):
        return fsdp.AdamW(model.parameters(), lr=1e-3, ranks=REPLICAS)

    kinds = ("adacomp", "topk", "demo", "powersgd", "maxnorm", "fp16", "onebit", "dgc")
    for number, spec in enumerate(kinds):
        options = {"every": 2, "outer": fsdp.Nesterov()} if number % 3 == 0 else {}
        optimizer = (adamw, of_replicas, sgd)[number % 3]
        model, made = updating(spec, optimizer, **options)
        train(model, made, batches(4 if options else 2), clip=1.0)
        assert_replicas_identical(model)
        assert made.compression.stats()["steps"] == 2


@case(4)
def adamw_of_ranks_is_the_same_over_shards():
    """As over whole parameters, under DDP's UpdateOptimizer."""
    whole_model = model_of()
    made = ddp.UpdateOptimizer(
        ddp.AdamW(whole_model.parameters(), lr=1e-3, ranks=2), compression="none"
    )
    mesh = mesh_of(torch.distributed.get_world_size())
    model = cut(model_of(), mesh["shard"])
    its = fsdp.UpdateOptimizer(
        fsdp.AdamW(model.parameters(), lr=1e-3, ranks=2),
        compression="none",
        process_group=mesh["replicate"],
    )
    for each, optimizer in ((whole_model, made), (model, its)):
        train(each, optimizer, batches(12))
    flat = torch.cat([p.detach().double().flatten() for p in whole_model.parameters()])
    torch.testing.assert_close(whole(model), flat, rtol=0, atol=1e-6)


@case(4)
def shared_parameters_and_moments():
    model, optimizer = updating("topk:ratio=0.1,min_numel=0", every=4)
    data = list(batches(6))
    train(model, optimizer, data[:4])
    shared = whole(model)
    train(model, optimizer, data[4:])
    own = whole(model)

    def seen_in_forward():
        loss = loss_of(model, data[0]).detach()
        return loss

    mine, loss = own, seen_in_forward()
    with optimizer.shared_parameters():
        assert torch.equal(whole(model), shared) and not torch.equal(mine, shared)
        assert not torch.equal(seen_in_forward(), loss)
    # What the forward pass has gathered is gone.
    assert torch.equal(whole(model), own) and torch.equal(seen_in_forward(), loss)
    model.reshard()
    train(model, optimizer, data[:2])
    optimizer.average_state()
    mesh = mesh_of(REPLICAS)
    for param in model.parameters():
        for value in optimizer.state.get(param, {}).values():
            if torch.is_tensor(value) and value.dim():
                mine = value.to_local().clone()
                torch.distributed.broadcast(mine, group=mesh["replicate"].get_group(), group_src=0)
                assert torch.equal(mine, value.to_local())


@case(4)
def updates_that_are_not_finite_move_nothing():
    model, optimizer = updating("topk:ratio=0.1,min_numel=0")
    data = list(batches(3))
    train(model, optimizer, data[:2])
    before = whole(model)
    optimizer.zero_grad()
    loss_of(model, data[2]).backward()
    if torch.distributed.get_rank() == 3:
        model.words.weight.grad.to_local().view(-1)[0] = float("nan")
    optimizer.step()
    assert torch.isfinite(whole(model)).all()
    # The other shard's are finite, and move.
    assert torch.isfinite(before).all() and not torch.equal(whole(model), before)


@case(4)
def wrong_groups_of_updates_are_named():
    mesh = mesh_of(REPLICAS)
    model = cut(model_of(), mesh["shard"])
    for group in (None, mesh["shard"]):
        with raises(ValueError, "process_group", "mesh['replicate']"):
            fsdp.UpdateOptimizer(adamw(model), process_group=group)
    with raises(ValueError, "one dimension"):
        fsdp.UpdateOptimizer(adamw(model), process_group=mesh)
    other, optimizer = updating("none", seed=torch.distributed.get_rank() // 2)
    with raises(MismatchError, "parameters."):
        train(other, optimizer, batches(1))
    fsdp.compress(model, sgd(model), "none", replicate_group=mesh["replicate"])
    twice = fsdp.UpdateOptimizer(adamw(model), process_group=mesh["replicate"])
    with raises(ValueError, "FSDPCompression averages"):
        twice.step()
