"""Messages of any length, several at a time."""

import gc
import os
import resource

import numpy as np
import torch.distributed as dist
from checks import raises, registry

from horovod_compress import MismatchError
from horovod_compress.transport.distributed import DistributedTransport

from .training import assert_replicas_identical, batches, train, wrapped
from .updates import updating

CASES, case = registry()


def lengths_of(rng, size, count):
    """Of `count` frames of each rank, which all ranks know: some empty, some far above the rest."""
    usual = rng.integers(0, 60, (size, count))
    return usual * rng.choice([0, 1, 1, 1, 200], (size, count))


def frames_of(rank, step, lengths):
    rng = np.random.default_rng((rank, step))
    return [rng.integers(0, 256, length, np.uint8) for length in lengths]


@case(2)
def ranks_that_gather_different_things_get_an_error():
    transport = DistributedTransport(dist.new_group())
    wait = transport.allgather("step" if dist.get_rank() else "state", np.zeros(3, np.uint8))
    with raises(MismatchError, "another rank something else", "calls of all ranks"):
        wait()


@case(2)
def ranks_in_different_numbers_of_groups_make_one_more():
    dist.new_group([0], use_local_synchronization=True)
    model, optimizer, _ = wrapped("topk:ratio=0.1")
    train(model, optimizer, batches(2))
    assert_replicas_identical(model)


@case(3)
def ranks_of_a_group_that_are_in_different_numbers_of_groups_are_refused():
    dist.new_group([0])
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        model, optimizer, _ = wrapped("none", ddp_options={"process_group": pair})
        with raises(ValueError, "groups each", "before other groups"):
            train(model, optimizer, batches(1))


@case(2)
def models_leave_no_process_group_open():
    """Nor any file: those of all ranks, which are kept, and those of a group of the user's."""
    kept = [wrapped("topk:ratio=0.1")]
    train(*kept[0][:2], batches(1))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 14, usual[1]))
    try:
        for _ in range(2):
            kept += [wrapped("topk:ratio=0.1"), updating("topk")]
            for each in kept[-2:]:
                train(*each[:2], batches(1))
            own = dist.new_group()
            last = wrapped("topk:ratio=0.1", ddp_options={"process_group": own})
            train(*last[:2], batches(1))
            assert_replicas_identical(last[0])
            dist.destroy_process_group(own)
            del last, own
            gc.collect()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@case(2)
def a_process_group_that_was_destroyed_is_not_used_again():
    train(*wrapped("topk:ratio=0.1")[:2], batches(1))
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    options = {"is_master": rank == 0, "wait_for_workers": False}
    served = dist.TCPStore("localhost", 0, size, **options) if rank == 0 else None
    port = [served and served.port]
    dist.broadcast_object_list(port)
    store = served or dist.TCPStore("localhost", port[0], size, **options)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    model, optimizer, _ = wrapped("topk:ratio=0.1")
    train(model, optimizer, batches(2))
    assert_replicas_identical(model)


@case(2, 3)
def frames_of_any_length_arrive_in_rank_order():
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = DistributedTransport(dist.new_group())
    rng = np.random.default_rng(0)
    for step in range(60):
        count = int(rng.integers(1, 6))
        lengths = lengths_of(rng, size, count)
        sent = [frames_of(r, step, lengths[r]) for r in range(size)]
        numbers = rng.standard_normal((size, 3, 40)).astype(np.float32)
        large = np.full(30_000, rank + step, np.float32)
        gathers = [transport.allgather(f"gather.{i}", frame) for i, frame in enumerate(sent[rank])]
        sums = [
            transport.allreduce(f"sum.{i}", numbers[rank, i].copy(), op)
            for i, op in enumerate(("sum", "max", "sum"))
        ]
        whole = transport.allreduce("large", large)
        splits = rng.integers(0, 50, (size, size))
        parts = [frames_of(r, step + 1000, [splits[r].sum()])[0] for r in range(size)]
        exchanged = transport.alltoall("parts", parts[rank], splits[rank].tolist())
        if step % 2:
            transport.send()
        for i, wait in enumerate(gathers):
            expected = np.concatenate([sent[r][i] for r in range(size)])
            assert np.array_equal(wait(), expected), (step, i)
        for i, (wait, of) in enumerate(zip(sums, (np.sum, np.max, np.sum))):
            np.testing.assert_allclose(wait(), of(numbers[:, i], axis=0), rtol=1e-6, atol=1e-6)
        assert (whole() == sum(range(size)) + size * step).all()
        for r, part in enumerate(exchanged()):
            first = splits[r, :rank].sum()
            assert np.array_equal(part, parts[r][first : first + splits[r, rank]]), (step, r)
