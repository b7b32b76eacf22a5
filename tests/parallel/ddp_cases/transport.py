"""Messages of any length, several at a time."""

import numpy as np
import torch.distributed as dist
from checks import raises, registry
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import MismatchError, ddp
from horovod_compress.transport.distributed import DistributedTransport

from .training import assert_replicas_identical, batches, model_of, sgd, train, wrapped

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
        model = DDP(model_of(), process_group=pair)
        with raises(ValueError, "[3, 2] groups each", "before other groups"):
            ddp.compress(model, sgd(model), "none")


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
