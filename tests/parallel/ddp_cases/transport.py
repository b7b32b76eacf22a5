"""Messages of any length, several at a time."""

import numpy as np
import torch.distributed as dist
from checks import registry

from horovod_compress.transport.distributed import DistributedTransport

CASES, case = registry()


def lengths_of(rng, size, count):
    """Of `count` frames of each rank, which all ranks know: some empty, some far above the rest."""
    usual = rng.integers(0, 60, (size, count))
    return usual * rng.choice([0, 1, 1, 1, 200], (size, count))


def frames_of(rank, step, lengths):
    rng = np.random.default_rng((rank, step))
    return [rng.integers(0, 256, length, np.uint8) for length in lengths]


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
