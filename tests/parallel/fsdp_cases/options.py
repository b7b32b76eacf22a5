"""Loss scales, steps that are skipped or discarded, and trials."""

import torch
import torch.distributed as dist
from checks import raises, registry

from .training import (
    DENSE,
    adamw,
    assert_close,
    assert_replicas_identical,
    batches,
    loss_of,
    sharded,
    train,
    whole,
)

CASES, case = registry()
SPARSE = "topk:ratio=0.1,min_numel=0"


@case(4)
def a_loss_scale_leaves_no_trace():
    def scaled(spec):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        options = {} if spec is None else {"grad_scaler": scaler}
        model, optimizer, _ = sharded(spec, **options)
        for x in batches(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_replicas_identical(model)
        return model

    plain = scaled(None)
    for spec in ("none", DENSE):
        assert_close(scaled(spec), plain)


@case(2)
def discarded_steps_leave_no_trace():
    model, optimizer, compression = sharded(SPARSE, discardable=True)
    reference, its, _ = sharded(SPARSE, discardable=True)
    for step, x in enumerate(batches(5)):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        if step == 2:
            compression.discard()
            continue
        if step == 3:
            # Skipped without a word.
            continue
        optimizer.step()
        train(reference, its, [x])
    assert torch.equal(whole(model), whole(reference))
    assert compression.stats()["steps_undone"] == 2


@case(4)
def a_trial_chooses_alike_on_all_shards():
    spec = {"id": "auto", "candidates": ["none", SPARSE], "probe_steps": 6}
    model, optimizer, compression = sharded(spec, optimizer=adamw)
    train(model, optimizer, batches(24))
    assert_replicas_identical(model)
    chosen = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, compression.plan["spec"])
    assert chosen[0] is not None and len(set(chosen)) == 1
    assert compression.config["id"] == chosen[0].partition(":")[0]


@case(2)
def clipping_warns_where_gradients_hold_a_momentum():
    import warnings

    model, optimizer, _ = sharded("dgc:ratio=0.1,min_numel=0")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, optimizer, batches(3), clip=1e-3)
    assert any("gradients were changed between backward()" in str(its.message) for its in said)


@case(4)
def a_momentum_on_schedule():
    """What a scheduler makes of SGD's momentum counts from the next step on."""
    plain, optimizer, _ = sharded(None)
    model, its, _ = sharded(DENSE)
    for step, x in enumerate(batches(6)):
        for each, made in ((plain, optimizer), (model, its)):
            made.param_groups[0]["momentum"] = 0.9 if step < 3 else 0.5
            train(each, made, [x])
    assert_close(model, plain)


@case(2)
def a_rank_alone_exchanges_nothing():
    model, optimizer, compression = sharded("dgc:ratio=0.1", replicas=1)
    plain, its, _ = sharded(None, replicas=1)
    for each, made in ((model, optimizer), (plain, its)):
        train(each, made, batches(3))
    assert torch.equal(whole(model), whole(plain))
    assert compression.stats()["bytes_sent"] == 0
    with raises(AttributeError, "auto()"):
        assert compression.plan
