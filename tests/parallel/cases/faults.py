"""Faults while training: the next step works, or an error says what to do, and nothing is lost."""

import contextlib
import copy
import dataclasses
import os
import pathlib
import resource
import signal
import subprocess
import tempfile
import threading
import time

import horovod.torch as hvd
import numpy as np
import torch
from checks import raises, registry
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovod_compress.torch as hvdc
from horovod_compress import WireError
from horovod_compress.compressors.topk import TopK
from horovod_compress.torch.transport import HorovodTransport

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
SPECS = (
    "topk:ratio=0.1,sample_ratio=1",
    "dgc:ratio=0.1,sample_ratio=1",
    "powersgd:rank=2",
    "adacomp",
)
LIKE_TOPK = {"sample_ratio": 1.0, "ratio": 0.1}


class Fault(Exception):
    pass


def setup(spec="topk:ratio=0.1,sample_ratio=1", **options):
    model = model_of()
    optimizer = sgd(model, momentum=0)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), **options
    )
    return model, compression, wrap(model, optimizer, compression)


def state_of(compression):
    tensors = compression.state_dict()["tensors"]
    return torch.cat(
        [array.flatten() for arrays in tensors.values() for array in arrays.values()]
        or [torch.zeros(1)]
    )


def assert_same(run, other, what):
    assert torch.equal(flat(run[0]), flat(other[0])), (
        f"{what}: parameters differ by {(flat(run[0]) - flat(other[0])).abs().max()}"
    )
    assert torch.equal(state_of(run[1]), state_of(other[1])), f"{what}: what is kept differs"
    assert_replicas_identical(run[0])


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@contextlib.contextmanager
def during_backward(model, fault, ranks):
    """The fault happens on these ranks when the gradient of the shared layer comes, after that of
    the last one."""
    handle = model.shared.weight.register_hook(lambda _: fault() if hvd.rank() in ranks else None)
    try:
        yield
    finally:
        handle.remove()


def fail():
    raise Fault("in a hook")


def interrupt():
    signal.raise_signal(signal.SIGINT)


@case(2)
def exceptions_in_backward_and_after_it_leave_no_trace():
    """In a hook, on one rank or both, or in the user's loop: synchronize() and zero_grad(), and bit
    for bit the step has never been."""
    for spec in SPECS:
        reference, run = setup(spec, discardable=True), setup(spec, discardable=True)
        model, _, optimizer = run
        for seed, (fault, ranks) in enumerate(
            ((fail, (0, 1)), (fail, (1,)), (interrupt, (0, 1)), (interrupt, (0,)), (None, ()))
        ):
            train(*reference[::2], batches(2, seed))
            train(model, optimizer, batches(2, seed))
            optimizer.zero_grad()
            try:
                with during_backward(model, fault, ranks):
                    loss_of(model, next(batches(1, seed=9))).backward()
                assert hvd.rank() not in ranks
                raise Fault("in the loop")
            except (Fault, KeyboardInterrupt):
                with raises(AssertionError, "optimizer.synchronize()"):  # Horovod's
                    optimizer.zero_grad()
                optimizer.synchronize()
                optimizer.zero_grad()
        for each in (reference, run):
            train(*each[::2], batches(1))
        assert_same(run, reference, spec)


@case(2)
def gradients_of_a_step_that_failed_are_conserved():
    """Without discardable, on one rank: the step is taken with what there is. What was sent and
    what is kept add up to all gradients that came."""
    for spec in ("topk:ratio=0.1", "adacomp", "powersgd:rank=2"):
        model, compression, optimizer = setup(spec)
        before, came = flat(model), {}
        watched = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        total = {name: torch.zeros_like(p) for name, p in watched}
        hooks = [
            p.register_hook(lambda g, name=name: came.__setitem__(name, g.clone()))
            for name, p in watched
        ]
        for step, batch in enumerate(batches(6)):
            optimizer.zero_grad()
            came.clear()
            with (
                contextlib.suppress(Fault),
                during_backward(model, fail, (1,) if step == 3 else ()),
            ):
                loss_of(model, batch).backward()
            if step == 3 and hvd.rank() == 1:
                assert 0 < len(came) < len(watched)
                # Recorded before the fault, and never handed over.
                came.pop("shared.weight", None)
            for name, gradient in came.items():
                total[name] += gradient
            optimizer.step()
        assert_replicas_identical(model)
        [hook.remove() for hook in hooks]
        after, kept = dict(model.named_parameters()), compression.state_dict()["tensors"]
        start = torch.split(before, [p.numel() for p in model.parameters()])
        for (name, p), old in zip(model.named_parameters(), start):
            if p.requires_grad:
                residual = next(
                    (array for key, array in kept[name].items() if key in ("residual", "v", "r")),
                    torch.zeros(p.numel()),
                )
                owed = hvd.allreduce(
                    total[name].flatten() - residual.flatten(), name=f"owed {name}"
                )
                moved = (old - after[name].detach().flatten()) / 0.05
                assert (moved - owed).abs().max() <= 1e-4 * max(1, owed.abs().max()), (
                    spec,
                    name,
                    (moved - owed).abs().max(),
                )


@dataclasses.dataclass(frozen=True, repr=False)
class Interrupted(TopK):
    """top-k, which gets Control-C while it decodes, in the steps of `at`."""

    id = "interrupted"
    at = set()

    def add(self, body, out, scale):
        if self.at:
            self.at.clear()
            interrupt()
        return super().add(body, out, scale)


def reload(run, saved):
    for each, state in zip(run, saved):
        each.load_state_dict(state)


@case(2)
def a_payload_that_does_not_fit_leaves_no_trace():
    """One tensor's, the first or the last, or all: the error, then synchronize() and zero_grad() as
    after any other, and bit for bit the step has never been."""
    topk = "topk:ratio=0.1,sample_ratio=1,min_numel=0"
    for spec in (topk, f"{topk},exchange=split", "adacomp:min_numel=0"):
        reference, run = setup(spec, discardable=True), setup(spec, discardable=True)
        model, compression, optimizer = run
        tensors = compression._session.exchange.tensors
        names = [tensor.name for tensor in tensors]
        for seed, changed in enumerate((names[:1], names[-1:], names)):
            train(*reference[::2], batches(1, seed))
            train(model, optimizer, batches(1, seed))
            digests = {name: tensors[name].digest for name in changed}
            for name in changed:
                tensors[name].digest += hvd.rank()
            optimizer.zero_grad()
            loss_of(model, next(batches(1, seed=9))).backward()
            with raises(WireError, f"rank {1 - hvd.rank()}"):
                optimizer.step()
            optimizer.synchronize()
            assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)
            optimizer.zero_grad()
            for name, digest in digests.items():
                tensors[name].digest = digest
        for each in (reference, run):
            train(*each[::2], batches(1))
        assert_same(run, reference, spec)


@case(2)
def control_c_while_results_come():
    """The step is given up, and the next one works. With the last saved states it is as if nothing
    had been."""
    reference = setup()
    train(*reference[::2], batches(6))
    for saved in (True, False):
        run = model, _, optimizer = setup(Interrupted(**LIKE_TOPK), discardable=not saved)
        train(model, optimizer, batches(3))
        states = copy.deepcopy([each.state_dict() for each in run])
        Interrupted.at.add("the next")
        with raises(KeyboardInterrupt):
            train(model, optimizer, batches(1, seed=5))
        with raises(
            RuntimeError,
            "the step was interrupted while the result of",
            "load the last saved states",
        ):
            optimizer.step()
        if saved:
            reload(run, states)
        train(model, optimizer, list(batches(6))[3:])
        assert_same(run, reference, "interrupted")


@case(2)
def a_backward_pass_too_many_gives_the_step_up():
    """An exception between backward() and step(), and the loop goes on: Horovod refuses, the
    compression gives the step up, the next one works."""
    for spec in SPECS:
        reference, run = setup(spec, discardable=True), setup(spec, discardable=True)
        train(*reference[::2], batches(6))
        model, compression, optimizer = run
        train(model, optimizer, batches(3))
        loss_of(model, next(batches(1, seed=5))).backward()
        with raises(AssertionError, "Gradients were computed more than"):
            loss_of(model, next(batches(1, seed=6))).backward()
        with raises(RuntimeError, "was changed while it was exchanged", "The step was given up"):
            optimizer.synchronize()
        train(model, optimizer, list(batches(6))[3:])
        assert compression.stats()["steps_undone"] == 1
        assert_same(run, reference, spec)


@case(2)
def a_rank_that_stops_for_a_while():
    """SIGSTOP and SIGCONT: the other waits, and nothing depends on how long."""
    pids = hvd.allgather(torch.tensor([os.getpid()]), name="pids").tolist()
    for transport in ("horovod", "mpi") if hvd.mpi_enabled() else ("horovod",):
        reference, run = setup(), setup(f"topk:ratio=0.1,sample_ratio=1,transport={transport}")
        train(*reference[::2], batches(60))
        began = time.monotonic()
        # Not in a thread: none runs while Horovod waits for a result.
        if hvd.rank() == 0:
            stops = subprocess.Popen(
                ["sh", "-c", f"sleep 0.02; kill -STOP {pids[1]}; sleep 0.3; kill -CONT {pids[1]}"]
            )
        train(*run[::2], batches(60))
        assert time.monotonic() - began > 0.25, "no rank had to wait"
        assert_same(run, reference, transport)
        assert hvd.rank() or stops.wait() == 0


@contextlib.contextmanager
def full_disk(limit):
    """No file can grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@case(2)
def a_disk_that_is_full_at_a_checkpoint():
    """torch's error, on the rank that has it; training goes on, what was saved before is whole, and
    saving again works."""
    reference, run = setup(), setup()
    train(*reference[::2], batches(6))
    model, compression, optimizer = run
    with tempfile.TemporaryDirectory() as folder:
        path, aside = pathlib.Path(folder) / "state.pt", pathlib.Path(folder) / "state.pt.new"
        train(model, optimizer, batches(2))
        torch.save(compression.state_dict(), path)
        train(model, optimizer, list(batches(4))[2:])
        if hvd.rank() == 1:
            with raises((OSError, RuntimeError)), full_disk(4096):
                torch.save(compression.state_dict(), aside)
            with raises(Exception):
                torch.load(aside, weights_only=True)
        assert torch.load(path, weights_only=True)["step"] == 2
        train(model, optimizer, list(batches(6))[4:])
        torch.save(compression.state_dict(), aside)
        aside.replace(path)
        assert torch.load(path, weights_only=True)["step"] == 6
    assert_same(run, reference, "full")


@case(2)
def training_in_a_second_thread():
    reference, run = setup(), setup()
    train(*reference[::2], batches(6))
    train(*run[::2], batches(2))
    thread = threading.Thread(target=train, args=(*run[::2], list(batches(4))[2:]))
    thread.start()
    thread.join()
    train(*run[::2], list(batches(6))[4:])
    assert_same(run, reference, "thread")


@case(2)
def data_that_forked_processes_load():
    """They have the compression's memory, and end while it trains."""
    x, y = (torch.cat(parts) for parts in zip(*batches(6)))
    runs = []
    for workers in (0, 2):
        run = setup("dgc:ratio=0.1")
        for _ in range(2):
            options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
            train(*run[::2], DataLoader(TensorDataset(x, y), batch_size=8, **options))
        runs.append(run)
    assert_same(*runs, "forked")
    assert_close(runs[1][0], runs[0][0], 0)


@case()
def ends_after_fewer_steps():
    """By name: the process of rank 1 ends without an error while the other starts operations, as a
    backward pass does."""
    train(*setup()[::2], batches(5))
    transport, waits = HorovodTransport(hvd.global_process_set), []
    while hvd.rank() == 0:
        name = f"later.{len(waits)}"
        waits.append(transport.allgather(f"{name}.gather", np.zeros(8, np.uint8)))
        waits.append(transport.allreduce(f"{name}.reduce", np.zeros(8, np.float32)))
        # Horovod takes them one cycle after the other.
        time.sleep(1e-5)
