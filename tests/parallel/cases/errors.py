"""Mistakes are errors: on every rank, in words, without a hang."""

import time
import warnings

import horovod.torch as hvd
import torch
from checks import raises, registry
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError, kernels
from horovod_compress.session import choice

from .training import (
    assert_replicas_identical,
    batches,
    compressed,
    flat,
    model_of,
    sgd,
    train,
    wrap,
)

CASES, case = registry()


@case(2, 3)
def mismatched_ranks_are_named():
    last = hvd.size() - 1
    ours = "dgc:ratio=0.01"
    for theirs, words in (
        ("dgc:ratio=0.02", ("options.ratio", f"rank {last}", "0.02", "0.01")),
        ("dgc:ratio=0.01,min_numel=0", ("options.min_numel",)),
        ("none", ("options.id", "none", "dgc")),
    ):
        model = model_of()
        with raises(MismatchError, *words):
            compressed(model, sgd(model), 1, theirs if hvd.rank() == last else ours)
    model = model_of()
    if hvd.rank() == last:
        model.out = nn.Linear(64, 11)
    with raises(MismatchError, "tensors.out.weight.shape", f"rank {last}", "[11, 64]"):
        hvdc.Compression.from_spec(
            ours, sgd(model), named_parameters=model.named_parameters()
        ).handshake()
    model, installed = model_of(), choice.__version__
    choice.__version__ = "0.0.9" if hvd.rank() == last else installed
    with raises(MismatchError, "version of horovod-compress", "0.0.9", installed):
        hvdc.Compression.from_spec(
            ours, sgd(model), named_parameters=model.named_parameters()
        ).handshake()
    choice.__version__ = installed
    model = model_of()
    with raises(MismatchError, "momentum", f"rank {last}"):
        compressed(model, sgd(model, momentum=0.8 if hvd.rank() == last else 0.9), 1, ours)


@case()
def ranks_on_different_kernels():
    """Asked for by name, with the reference on rank 1."""
    assert kernels.backend == ("reference" if hvd.rank() == 1 else "native")
    for spec in (
        "dgc:ratio=0.05,clip_norm=1,min_numel=0",
        "terngrad:min_numel=0",
        "efsignsgd:min_numel=0",
    ):
        model = model_of()
        compressed(model, sgd(model), 10, spec)
        assert_replicas_identical(model)
    model = model_of()
    with raises(
        MismatchError,
        "rank 1 differs from rank 0 in kernels",
        "powersgd",
        "reference on rank 1, native on rank 0",
    ):
        compressed(model, sgd(model), 1, "powersgd")


@case(2)
def mistakes_get_clear_errors():
    model = model_of()
    with raises(ValueError, "dampening"):
        hvdc.Compression.dgc(sgd(model, dampening=0.1), named_parameters=model.named_parameters())
    with raises(ValueError, "does not name"):
        hvdc.Compression.dgc(sgd(model), named_parameters=model.conv.named_parameters())
    with raises(ValueError, "unique", "x"):
        hvdc.Compression.dgc(sgd(model), named_parameters=[("x", p) for p in model.parameters()])
    with raises(ValueError, "pairs"):
        hvdc.Compression.dgc(sgd(model), named_parameters=model.parameters())
    with raises(ValueError, "no option 'ration'", "ratio"):
        hvdc.Compression.dgc(sgd(model), named_parameters=model.named_parameters(), ration=1)
    with raises(ValueError, "say momentum="):
        hvdc.Compression.dgc(None, named_parameters=model.named_parameters())
    with raises(ValueError, "not registered"):
        hvdc.Compression.dgc(
            sgd(model), named_parameters=model.named_parameters(), process_set=hvd.ProcessSet([0])
        )
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(optimizer, named_parameters=model.named_parameters())
    model.extra = nn.Linear(10, 10)
    optimizer.add_param_group({"params": model.extra.parameters()})
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    assert wrapped.param_groups[-1]["params"] == list(model.extra.parameters())
    x, y = next(batches(1))
    with raises(ValueError, "add_param_group"):
        nn.functional.cross_entropy(model.extra(model(x)), y).backward()
    hvd.barrier()


@case(2)
def adasum_is_refused():
    model = model_of()
    optimizer = sgd(model)
    compression = hvdc.Compression.dgc(optimizer, named_parameters=model.named_parameters())
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Adasum
    )
    with raises(ValueError, "op=Adasum is not supported"):
        train(model, wrapped, batches(1))


@case(2)
def momentum_is_taken_over_and_nothing_is_patched():
    import horovod.torch.optimizer as theirs

    before = {name: value for name, value in vars(theirs).items() if callable(value)}
    for spec in ("dgc", "dgc:momentum=0", "none"):
        model = model_of()
        made = sgd(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvdc.Compression.from_spec(spec, made, named_parameters=model.named_parameters())
        assert made.param_groups[0]["momentum"] == 0.9, spec
    model = model_of()
    adam = torch.optim.Adam(model.parameters())
    assert (
        hvdc.Compression.dgc(adam, named_parameters=model.named_parameters()).config["momentum"]
        == 0
    )
    assert {name: value for name, value in vars(theirs).items() if callable(value)} == before


@case(1)
def one_rank_trains_as_without_compression():
    reference, model = model_of(), model_of()
    train(
        reference,
        wrap(reference, sgd(reference, weight_decay=0.01), hvd.Compression.none),
        batches(5),
    )
    compression = compressed(model, sgd(model, weight_decay=0.01), 5)
    assert torch.equal(flat(model), flat(reference))
    assert compression.stats()["steps"] == 0


def assert_join_is_refused(spec, *words):
    model = model_of()
    optimizer = sgd(model)
    wrapped = wrap(
        model,
        optimizer,
        hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters()),
    )
    # Until frames keep their lengths, so that Horovod would answer from its cache.
    train(model, wrapped, batches(20))
    if hvd.rank() == 0:
        with raises(
            RuntimeError, *words, "1 of 2 ranks have called hvd.join() (rank 1)", "hvdc.uneven"
        ):
            train(model, wrapped, batches(1))
    hvd.join()


@case(2)
def join_is_refused():
    assert_join_is_refused("dgc", "hvd.join() works with Horovod's own reductions only")


@case(2)
def join_is_refused_after_a_step_that_failed():
    """What that step still held is not started, because the other rank would die of it."""
    model = model_of()
    optimizer = wrap(model, sgd(model), hvdc.Compression.efsignsgd(min_numel=0))
    train(model, optimizer, batches(20))
    if hvd.rank() == 0:
        time.sleep(1)  # until the other one has joined

        def fail(grad):
            raise KeyError("spoilt")

        hook = next(model.parameters()).register_hook(fail)
        with raises(KeyError, "spoilt"):
            train(model, optimizer, batches(1))
        hook.remove()
        # Until what was sent has come back.
        time.sleep(1)
        # Which makes Horovod forget what it has sent.
        optimizer.load_state_dict(optimizer.state_dict())
        with raises(RuntimeError, "1 of 2 ranks have called hvd.join() (rank 1)"):
            train(model, optimizer, batches(1))
    hvd.join()


@case(2)
def join_is_refused_with_split():
    assert_join_is_refused(
        "dgc:exchange=split", "hvd.join() works with Horovod's own reductions only"
    )


@case(2)
def join_is_refused_with_sums():
    """The same for payloads that an allreduce adds up: without the ranks that have joined their
    sums would be too small."""
    assert_join_is_refused("maxnorm", "sums of this compression are wrong without them")
