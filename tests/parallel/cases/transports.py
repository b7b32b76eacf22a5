"""MPI gives what Horovod's own collectives give, and bytes are counted; two hosts, and one that
goes away."""

import contextlib
import functools
import itertools
import pathlib
import socket
import sys
import time
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry
from horovod.torch import mpi_ops
from owners import Owners
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress import MismatchError, available
from horovod_compress.tools.models import MODELS
from horovod_compress.torch.mpi import MPITransport
from horovod_compress.torch.transport import _views, keep, synchronize

from .told import reduced
from .training import (
    assert_close,
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
def mpi_gives_what_horovod_gives():
    moved = [id for id, about in available().items() if "transport" in about["options"]]
    for id in moved if hvd.size() == 2 else ("dgc", "multiscale", "powersgd"):
        (expected, other), (found, compression) = (
            reduced({"id": id, "min_numel": 0, "transport": transport}, steps=2)
            for transport in ("horovod", "mpi")
        )
        # Floats that are summed in another order differ in the last bits.
        tolerance = 1e-5 if id in ("globalrandk", "powersgd") and hvd.size() > 2 else 0
        assert (found - expected).abs().max() <= tolerance * expected.abs().max(), (
            f"{id} differs by {(found - expected).abs().max()}"
        )
        assert compression.stats_by_tensor() == other.stats_by_tensor(), id
        assert (found == hvd.broadcast(found, 0, name=f"of the first rank {id}")).all(), (
            f"{id}: replicas differ"
        )


class CountedMPI:
    """A communicator, and [bytes that its collectives have got, and brought of other ranks]."""

    def __init__(self, communicator, found):
        self.communicator, self.found = communicator, found

    def __getattr__(self, name):
        def counted(sent, received, *arguments):
            if name == "Allreduce":
                brought = received.nbytes, received.nbytes
            elif name == "Alltoallv":
                brought = sum(sent[1]), sum(received[1]) - received[1][hvd.rank()]
            else:
                whole = received[0] if name == "Allgatherv" else received
                own = sent.nbytes // (hvd.size() if name == "Alltoall" else 1)
                brought = sent.nbytes, whole.nbytes - own
            self.found[:] = [a + int(b) for a, b in zip(self.found, brought)]
            return getattr(self.communicator, name)(sent, received, *arguments)

        return counted


@contextlib.contextmanager
def collectives_counted():
    """[bytes that Horovod's and MPI's collectives have got from this rank, and brought of
    others]."""
    found, own, communicator = [0, 0], {}, MPITransport._communicator

    def started(function, tensor, *arguments, splits=None, **named):
        options = named if splits is None else {**named, "splits": splits}
        handle = function(tensor, *arguments, **options)
        sent = tensor.nbytes if splits is None else int(splits.sum())
        found[0] += sent
        if function is mpi_ops.allreduce_async_:
            found[1] += sent
        else:
            own[handle] = sent if splits is None else int(splits[hvd.rank()])
        return handle

    def ended(function, handle):
        result = function(handle)
        if handle in own:
            moved = result[0] if isinstance(result, tuple) else result
            found[1] += moved.nbytes - own.pop(handle)
        return result

    def counted(transport):
        if transport._comm is None:
            transport._comm = CountedMPI(communicator(transport), found)
        return transport._comm

    with contextlib.ExitStack() as stack:
        for where, name, double in (
            (hvd, "allgather_async", started),
            (hvd, "alltoall_async", started),
            (hvd, "allreduce_async_", started),
            (sys.modules["horovod.torch.optimizer"], "allreduce_async_", started),
            (hvd, "synchronize", ended),
        ):
            replaced = functools.partial(double, getattr(where, name))
            stack.enter_context(mock.patch.object(where, name, replaced))
        stack.enter_context(mock.patch.object(MPITransport, "_communicator", counted))
        yield found


@case(2, 3)
def what_collectives_get_is_what_stats_say():
    """Carriers, frames with padding, and all that transports and comparisons add; through a
    warm-up, switches and states, and of updates."""
    for transport in ("horovod", "mpi") if hvd.mpi_enabled() else ("horovod",):
        with collectives_counted() as found:
            model = model_of()
            optimizer = sgd(model)
            compression = hvdc.Compression.from_spec(
                f"dgc:ratio=0.01,warmup_steps=8,transport={transport}",
                optimizer,
                named_parameters=model.named_parameters(),
            )
            wrapped = wrap(model, optimizer, compression)
            for spec in (
                "",
                "topk:ratio=0.05,exchange=split,transport={}",
                "maxnorm:min_numel=0,transport={}",
                "powersgd:transport={}",
                "adacomp:transport={}",
                "dgc:momentum=0.9,clip_norm=1,min_numel=0,transport={}",
                "none",
            ):
                if spec:
                    compression.switch(spec.format(transport))
                train(model, wrapped, batches(3 if spec else 20))
                stats = compression.stats()
                told = [stats["bytes_sent"], stats["bytes_received"]]
                assert told == found, (transport, spec, told, found)
            compression.state_dict(portable=True)
            assert compression.stats()["bytes_sent"] == found[0] > 0
    with collectives_counted() as found:
        model = model_of()
        optimizer = hvdc.UpdateOptimizer(
            sgd(model), named_parameters=model.named_parameters(), compression="topk:ratio=0.05"
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(model, optimizer, batches(2))
        optimizer.switch("none")
        train(model, optimizer, batches(2))
        assert optimizer.compression.stats()["bytes_sent"] == found[0], found


@case(2)
def an_output_that_is_being_made_is_held():
    """Its sizes and strides do not fit together while Horovod's thread gives it them."""
    handle = hvd.allgather_async(torch.zeros(3), name="held")
    tensors = mpi_ops._handle_map[handle]
    mpi_ops._handle_map[-1] = (torch.zeros(3), torch.zeros(4, 5).t())
    try:
        keep(-1)
        assert all(view._base is not None and not view.numel() for view in _views.pop(-1))
    finally:
        del mpi_ops._handle_map[-1]
    keep(handle)
    assert [view._base is each for view, each in zip(_views[handle], tensors)] == [True, True]
    synchronize(handle)
    assert handle not in _views


@case(2, 3)
def an_alltoall_in_a_step():
    """A compressor that yields one works in both transports, to the byte; over Gloo in Horovod's
    own."""
    reference = model_of()
    train(reference, wrap(reference, sgd(reference), hvd.Compression.none), batches(5))
    sent = set()
    for transport in ("horovod", "mpi") if hvd.mpi_enabled() else ("horovod",):
        model = model_of()
        compression = compressed(model, sgd(model), 5, Owners(transport=transport, min_numel=0))
        assert_close(model, reference, tolerance=1e-5)
        assert_replicas_identical(model)
        sent.add(str(compression.stats_by_tensor()))
    assert len(sent) == 1 and compression.stats()["ratio"] < 1


@case(2)
def ranks_that_wait_in_different_orders():
    """For two optimizers, and for a reduction of their user's before or after the step."""
    models = [model_of(seed=seed) for seed in (0, 1)]
    wrapped = [
        wrap(model, sgd(model), hvdc.Compression.efsignsgd(min_numel=0), prefix=f"{i}.")
        for i, model in enumerate(models)
    ]
    for step, (x, y) in enumerate(batches(15)):
        for model in models:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        if hvd.rank() == 0 and step > 9:
            hvd.allreduce(loss.detach(), name="loss")
        for optimizer in wrapped if hvd.rank() else wrapped[::-1]:
            optimizer.step()
        if hvd.rank() == 1 and step > 9:
            hvd.allreduce(loss.detach(), name="loss")
    for model in models:
        assert_replicas_identical(model)


@case(2)
def a_rank_that_joins_in_the_middle_of_a_step():
    """When its gradients are there, the other one takes that step with them."""
    model, reference = model_of(), model_of()
    optimizer = wrap(model, sgd(model), hvdc.Compression.topk(ratio=0.05))
    its = wrap(reference, sgd(reference), hvdc.Compression.topk(ratio=0.05))
    for each, each_optimizer in (model, optimizer), (reference, its):
        # Until frames keep their lengths, so that Horovod would answer from its cache.
        train(each, each_optimizer, batches(20))
    ((x, y),) = batches(1, seed=1)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    time.sleep(1)
    if hvd.rank() == 0:
        time.sleep(1)
        optimizer.step()
    hvd.join()
    train(reference, its, [(x, y)])
    if hvd.rank() == 0:
        assert torch.equal(flat(model), flat(reference))


@case(3)
def mpi_in_a_process_set():
    members = hvd.add_process_set([0, 2])
    if members.included():
        for spec in ("dgc:min_numel=0,momentum=0.9", "maxnorm:min_numel=0"):
            (expected, _), (found, _) = (
                reduced(f"{spec},transport={t}", process_set=members) for t in ("horovod", "mpi")
            )
            assert (found == expected).all(), spec
    hvd.remove_process_set(members)


@case(2)
def mpi_transport_with_two_compressions_and_a_step_that_is_not_finite():
    models = [model_of(seed=seed) for seed in (0, 1)]
    optimizers = [sgd(model) for model in models]
    compressions = [
        hvdc.Compression.from_spec(spec, optimizer, named_parameters=model.named_parameters())
        for spec, optimizer, model in zip(
            ("dgc:ratio=0.05,transport=mpi", "maxnorm:transport=mpi"), optimizers, models
        )
    ]
    wrapped = [wrap(*each) for each in zip(models, optimizers, compressions)]
    for round in range(3):
        for model, optimizer, compression in zip(models, wrapped, compressions):
            train(model, optimizer, batches(4))
            assert_replicas_identical(model)
            before = flat(model)
            x, y = next(batches(1))
            model.zero_grad()
            (
                nn.functional.cross_entropy(model(x), y) * (float("nan") if hvd.rank() == 1 else 1)
            ).backward()
            optimizer.synchronize()
            assert any(torch.isnan(p.grad).any() for p in model.parameters() if p.requires_grad)
            assert (
                compression.stats()["steps_undone"] == round + 1 and (flat(model) == before).all()
            )


@case(2)
def mpi_ranks_that_exchange_different_things_get_an_error():
    transport = MPITransport(hvd, hvd.global_process_set)
    started = [transport.allgather(f"a{i}", np.zeros(3, np.uint8)) for i in range(1 + hvd.rank())]
    with raises(MismatchError, "arrays in this step"):
        started[0]()
    # As many, and others.
    with raises(MismatchError, "arrays in this step"):
        transport.allreduce("b", np.ones(2 + hvd.rank(), np.float32))()
    # The ranks are in step.
    assert transport.allgather("again", np.full(2, hvd.rank(), np.uint8))().tolist() == [0, 0, 1, 1]


@case()
def mpi_needs_mpi():
    """Under Gloo, by name."""
    model = model_of()
    with raises(ValueError, "transport=mpi needs a Horovod that runs on MPI"):
        compressed(model, sgd(model), 1, "dgc:transport=mpi")


@case()
def on_two_hosts():
    """By name: the ranks are on two hosts, and both roads work there, on both transports."""
    names = hvd.allgather_object(socket.gethostname(), name="hosts")
    assert sorted(set(names)) == ["a", "b"] and names.count("a") == names.count("b"), names
    for spec in ("dgc:min_numel=0,momentum=0.9", "maxnorm:min_numel=0"):
        expected, _ = reduced(spec)
        if hvd.mpi_enabled():
            found, _ = reduced(f"{spec},transport=mpi")
            assert (found == expected).all(), spec
        assert (expected == hvd.broadcast(expected, 0, name=f"of the first rank {spec}")).all(), (
            spec
        )


@case()
def trains_until_cut_off():
    """By name: a host goes away meanwhile."""
    model = model_of()
    optimizer = sgd(model)
    transport = "mpi" if hvd.mpi_enabled() else "horovod"
    wrapped = wrap(
        model,
        optimizer,
        hvdc.Compression.dgc(
            optimizer, named_parameters=model.named_parameters(), transport=transport
        ),
    )
    for step in range(10**6):
        train(model, wrapped, batches(1))
        if step == 10:
            pathlib.Path(f"{sys.argv[2]}.{hvd.rank()}.trains").touch()


def steps_that_are_told(spec):
    """Steps with ResNet-50's first gradients, after each of which a rank says so: where Horovod
    logs, for lines of two streams come in any order."""
    shapes = dict(itertools.islice(MODELS["resnet50"]().items(), 40))
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes.values()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=list(zip(shapes, model))
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=list(zip(shapes, model)), compression=compression
    )
    torch.manual_seed(hvd.rank())
    gradients = [[torch.randn(shape) for shape in shapes.values()] for _ in range(2)]
    for step in range(30):
        wrapped.zero_grad()
        sum(
            (param * gradient).sum() for param, gradient in zip(model, gradients[step % 2])
        ).backward()
        wrapped.step()
        print(f"step {step} of rank {hvd.rank()}", flush=True)


@case()
def gathers_with_steps_that_are_told():
    # Of which six tensors' payloads are too large for one message with others.
    steps_that_are_told("dgc:ratio=0.03")


@case()
def splits_with_steps_that_are_told():
    steps_that_are_told("dgc:ratio=0.001,exchange=split")
