"""A compression that chooses by steps of training."""

import io
import pickle

import horovod.torch as hvd
import torch
from checks import raises, registry

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError

from .training import (
    assert_close,
    assert_replicas_identical,
    batches,
    flat,
    model_of,
    sgd,
    train,
    wrap,
)

CASES, case = registry()


@case(2)
def auto_chooses_while_it_trains():
    for optimizer_of in (sgd, lambda model: torch.optim.Adam(model.parameters(), 1e-3)):
        model = model_of()
        compression = pickle.loads(pickle.dumps(hvdc.Compression.auto(probe_steps=12)))
        wrapped = wrap(model, optimizer_of(model), compression)
        train(model, wrapped, batches(30))
        assert_replicas_identical(model)
        plan = compression.plan
        # Nothing sparse is tried by itself on gradients of Adam.
        sparse = ["dgc:ratio=0.01", "dgc:ratio=0.01,min_numel=65536"] if optimizer_of is sgd else []
        assert list(plan["candidates"]) == ["none", "fp16", *sparse]
        assert plan["spec"] in plan["candidates"] and plan["ranks"] == 2
        assert all(
            its["seconds"] > 0 and its["steps"] >= 1 for its in plan["candidates"].values()
        ), plan
        assert hvd.allgather_object(plan) == [plan, plan]  # all ranks have seen the same
        assert (
            compression.config["id"] == plan["spec"].partition(":")[0]
            and compression.stats()["steps"] == 30
        )


@case(2, 4)
def auto_tries_ways_to_exchange():
    """Entries that owners select again, and gradients that hosts add up first, are candidates as
    any other."""
    model = model_of()
    candidates = ["dgc:ratio=0.01", "dgc:ratio=0.01,exchange=split", "dgc:ratio=0.01,hosts=true"]
    compression = hvdc.Compression.auto(candidates=candidates, probe_steps=9, margin=0)
    train(model, wrap(model, sgd(model), compression), batches(15))
    plan = compression.plan
    assert plan["spec"] in candidates and all(
        its["steps"] >= 1 for its in plan["candidates"].values()
    ), plan
    assert_replicas_identical(model)
    assert compression.stats()["steps_undone"] == 0


@case(2)
def what_auto_tries_trains_as_plain_horovod_does():
    """Candidates of the dense limit: whatever it tries and chooses, parameters are those of plain
    Horovod."""
    reference, model = model_of(), model_of()
    plain = wrap(reference, sgd(reference, weight_decay=0.01), hvd.Compression.none)
    compression = hvdc.Compression.auto(
        candidates=["none", "dgc:ratio=1,masking=false", "topk:ratio=1"], margin=0
    )
    wrapped = wrap(model, sgd(model, weight_decay=0.01), compression)
    for net, optimizer in ((reference, plain), (model, wrapped)):
        train(net, optimizer, batches(40))
    assert compression.plan["spec"]
    assert_close(model, reference, 1e-5)


@case(2)
def a_choice_is_resumed():
    def start(seed):
        model = model_of(seed=seed)
        compression = hvdc.Compression.auto(
            candidates=["topk:ratio=0.5", "dgc:ratio=0.05"], margin=0
        )
        return model, compression, wrap(model, sgd(model), compression)

    model, compression, optimizer = start(0)
    train(model, optimizer, batches(35))
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), compression.state_dict()], saved)
    train(model, optimizer, batches(5, seed=1))
    again, its_compression, its_optimizer = start(7)
    saved.seek(0)
    for each, state in zip(
        (again, its_optimizer, its_compression), torch.load(saved, weights_only=True)
    ):
        each.load_state_dict(state)
    assert its_compression.plan["spec"] == compression.plan["spec"]
    train(again, its_optimizer, batches(5, seed=1))
    assert torch.equal(flat(again), flat(model))


@case(2)
def a_switch_by_the_user_ends_the_trial():
    for steps in (5, 30):
        model, compression = model_of(), hvdc.Compression.auto(probe_steps=12)
        optimizer = wrap(model, sgd(model), compression)
        train(model, optimizer, batches(steps))
        compression.switch("topk:ratio=0.1")
        train(model, optimizer, batches(5))
        state = compression.state_dict()
        assert (
            compression.plan["spec"] == state["auto"]["spec"] == "topk:ratio=0.1"
            and compression.config["id"] == "topk"
        )
        with raises(ValueError, "does not fit"):
            compression.load_state_dict({**state, "id": "adacomp"})
        for broken in ("state", [None, None]):
            with raises(ValueError, "state"):
                compression.load_state_dict(broken)
        with raises(ValueError, "without at"):
            compression.switch("none", at=100)
        assert_replicas_identical(model)


@case(2)
def ranks_that_would_try_differently_are_refused():
    model = model_of()
    with raises(MismatchError, "auto.margin"):
        train(
            model,
            wrap(model, sgd(model), hvdc.Compression.auto(margin=0.1 * hvd.rank())),
            batches(2),
        )


@case(2)
def what_auto_refuses():
    with raises(ValueError, "unknown compressor 'gdc'"):
        hvdc.Compression.auto(candidates=["none", "gdc"])
    with raises(ValueError, "5 are too few"):
        hvdc.Compression.auto(probe_steps=5)
    for steps in (30.5, "30", None, True):
        with raises(ValueError, "must be a whole number"):
            hvdc.Compression.auto(probe_steps=steps)
    for candidates in ("none", [], {"none", "fp16"}, {"none": 1}, 5, ["none", 3]):
        with raises(ValueError, "candidates must be a list of specs as text"):
            hvdc.Compression.auto(candidates=candidates)
    with raises(ValueError, "different compressions"):
        hvdc.Compression.auto(candidates=["none", "topk:ratio=0.01", "topk:ratio=0.010"])
    model = model_of()
    with raises(TypeError, "positional"):
        hvdc.Compression.auto(sgd(model))
    with raises(ValueError, "dampening"):
        impossible = hvdc.Compression.auto(candidates=["none", "dgc:ratio=0.01", "fp16"])
        train(model, wrap(model, sgd(model, dampening=0.1), impossible), batches(1))
    assert isinstance(hvdc.Compression.from_spec("auto"), hvdc.AutoCompression)


@case(2)
def auto_chooses_while_ranks_are_uneven():
    """A rank without data answers what the others ask while they choose, and later, when they look
    whether the choice still holds."""
    model = model_of()
    compression = hvdc.Compression.auto(candidates=["none", "topk:ratio=0.1"], probe_steps=6)
    optimizer = wrap(model, sgd(model), compression)
    with hvdc.uneven(optimizer, model):
        train(model, optimizer, batches(70 if hvd.rank() else 2))
    assert_replicas_identical(model)
    assert (
        hvd.allgather_object(compression.plan["spec"]) == [compression.plan["spec"]] * 2
        and compression.plan["spec"]
    )


@case(2)
def auto_leaves_momentum_to_an_sgd_that_cannot_give_it():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    for optimizer_of in (
        lambda model: Own(model.parameters(), 0.05, momentum=0.9),
        lambda model: sgd(model, dampening=0.1),
    ):
        model = model_of()
        compression = hvdc.Compression.auto(probe_steps=12)
        train(model, wrap(model, optimizer_of(model), compression), batches(14))
        assert list(compression.plan["candidates"])[2:] == [
            "topk:ratio=0.01",
            "topk:ratio=0.01,min_numel=65536",
        ]
