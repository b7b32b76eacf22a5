"""Messages of any length, several at a time, and what is counted of them."""

import contextlib
import functools
import gc
import os
import resource
from unittest import mock

import numpy as np
import torch.distributed as dist
from checks import raises, registry

from horovod_compress import MismatchError, WireError
from horovod_compress.torch_distributed import transport as distributed
from horovod_compress.torch_distributed.ranks import COUNTS
from horovod_compress.torch_distributed.transport import DistributedTransport

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


@contextlib.contextmanager
def collectives_counted():
    """[bytes that torch.distributed's collectives have got from this rank, and brought it from
    others]."""
    found = [0, 0]

    def counting(function, brought):
        def counted(*arguments, **named):
            sent, received = brought(*arguments)
            found[0] += sent
            found[1] += received
            return function(*arguments, **named)

        return counted

    others, rank = dist.get_world_size() - 1, dist.get_rank()
    counted = {
        (distributed, "_gather_rows"): lambda rows, row: (row.nbytes, others * row.nbytes),
        (dist, "all_reduce"): lambda tensor, *_: (tensor.nbytes, tensor.nbytes),
        (dist, "all_to_all_single"): lambda parts, sent, received, _: (
            sent.nbytes,
            parts.nbytes - received[rank],
        ),
    }
    with contextlib.ExitStack() as stack:
        for (where, name), brought in counted.items():
            double = counting(getattr(where, name), brought)
            stack.enter_context(mock.patch.object(where, name, double))
        yield found


@case(2, 3)
def what_collectives_get_is_what_stats_say():
    """Through a warm-up, switches and states, in each step; of updates too."""
    specs = (
        *("topk:ratio=0.05,exchange=split", "maxnorm:min_numel=0", "powersgd", "adacomp"),
        *("dgc:momentum=0.9,clip_norm=1,min_numel=0", "fp16", "none"),
    )
    with collectives_counted() as found:
        model, optimizer, compression = wrapped("dgc:ratio=0.01,warmup_steps=8")
        for switch in ("", *specs):
            if switch:
                compression.switch(switch)
            for batch in batches(1 if switch else 10):
                train(model, optimizer, [batch])
                stats = compression.stats()
                assert [stats["bytes_sent"], stats["bytes_received"]] == found, (switch, found)
        compression.state_dict(portable=True)
        assert compression.stats()["bytes_sent"] == found[0] > 0
    with collectives_counted() as found:
        model, optimizer = updating("topk:ratio=0.05")
        for switch in "", "maxnorm", "none":
            if switch:
                optimizer.switch(switch)
            train(model, optimizer, batches(2))
            assert optimizer.compression.stats()["bytes_sent"] == found[0], switch


@case(2)
def a_row_that_one_rank_alone_sees_damaged_holds_nobody_up():
    """Also where a second gather brings the rest of it: the others go on, and so does that rank,
    after an error."""
    rank, gather = dist.get_rank(), distributed._gather_rows
    transport = DistributedTransport(dist.new_group())
    damage = []

    def damaging(rows, row, **options):
        work = gather(rows, row, **options)
        work.wait()
        if damage:
            # Rank 0's, in rank 1's memory.
            rows[damage.pop()] ^= 4
        return work

    with mock.patch.object(distributed, "_gather_rows", damaging):
        for length in 10, 5000:
            # The mark, the checksum, the row's length and its other copy, and a frame's length.
            for at in 0, 4, 8, 16, 24:
                damage[:] = [at] * rank
                lengths = length + 100 * at, length
                wait = transport.allgather(f"{length}", np.full(lengths[rank], rank, np.uint8))
                if rank:
                    with raises(WireError, "payload of rank 0: the checksum of its lengths"):
                        wait()
                else:
                    assert wait().tolist() == [0] * lengths[0] + [1] * lengths[1]


def trained_in(group):
    model, optimizer, _ = wrapped("topk:ratio=0.1", ddp_options={"process_group": group})
    train(model, optimizer, batches(2))
    return model


refused = functools.partial(raises, ValueError, "groups each", "before other groups")


@case(2)
def ranks_that_have_made_different_numbers_of_groups():
    own = dist.new_group()
    dist.new_group([0], use_local_synchronization=True)
    if COUNTS:
        # Nor can PyTorch itself make one then.
        with refused():
            trained_in(own)
        dist.new_group([1], use_local_synchronization=True)
    assert_replicas_identical(trained_in(own))


@case(3)
def ranks_of_a_part_that_are_in_different_numbers_of_groups():
    dist.new_group([0])
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with contextlib.nullcontext() if COUNTS else refused():
            trained_in(pair)
    elif COUNTS:
        # The others have made one of ours: without this PyTorch could make none of all ranks now.
        dist.new_group([2], use_local_synchronization=True)


@case(2)
def models_leave_no_process_group_open():
    """Nor any file: those of all ranks, which are kept, and those of a group of the user's."""
    kept = [wrapped("topk:ratio=0.1")]
    train(*kept[0][:2], batches(1))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, usual[1]))
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
