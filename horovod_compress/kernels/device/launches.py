"""How a pass over many tensors is launched on a device, and how their numbers come and go.

A launch is for all tensors of a table. In a row are a tensor's number of elements, its first block,
and the program's arguments for it, which the program's docstring lists. What blocks find lies in
one array for all tensors.
"""

import contextlib
import functools
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
import triton

from ..landing import landing
from ..lists import Late
from .array import DeviceArray, stream_of

INTERPRETED = triton.knobs.runtime.interpret
# Elements of a block. Eight for each of 128 threads, so that many loads are under way. The
# interpreter takes a NumPy call for each block and line, over whole blocks: more elements than
# small tensors have take longer than the call itself.
BLOCK = 1 << 14 if INTERPRETED else 1024
# Words of a block, each of which is several elements: more take more registers.
WORD_BLOCK = BLOCK // 4
# Elements of a block where what is sent is marked, for the same reason.
MARK_BLOCK = BLOCK // 2
# Elements of a block that is searched, tile by tile: each finds first what was counted before.
SEARCHED = 1 << 14
# Bits of 2^110, as in the native kernels.
TOO_LARGE = 0x76800000
INFINITY = 0x7F800000
Row = Tuple[Any, ...]


class Blocks(NamedTuple):
    """How the blocks of a launch are dealt to its tensors. owners: of each block its tensor's
    number, int64 on the device; firsts: of each tensor its first block."""

    owners: torch.Tensor
    firsts: Sequence[int]

    def new(self, rows: int = 1) -> Any:
        """Memory for a number of each block, int32; a tensor for each row."""
        memory = self.owners.new_empty((rows, len(self.owners)), dtype=torch.int32)
        return memory[0] if rows == 1 else memory

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of each tensor, the largest of its blocks' numbers, 0 at least."""
        return numbers.new_zeros(len(self.firsts)).scatter_reduce_(0, self.owners, numbers, "amax")

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of each tensor, the sum of its blocks' numbers."""
        return numbers.new_zeros(len(self.firsts)).scatter_add_(0, self.owners, numbers)


def copied(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """A copy on the device of arrays of one type, one behind the other, on the stream that is
    current; the CPU does not wait for it, because it is made from pinned memory."""
    dtype = arrays[0].dtype
    pinned = device.type == "cuda"
    numel = sum(map(len, arrays))
    staged = torch.empty(numel, dtype=_TORCH_TYPES[dtype], device="cpu", pin_memory=pinned)
    np.concatenate(arrays, out=staged.numpy().view(dtype))
    return staged.to(device, non_blocking=True)


def there(arrays: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Arrays one behind the other on the device, each of which is there or on the CPU: without a
    copy where they lie so."""
    if all(isinstance(each, np.ndarray) for each in arrays):
        return copied(arrays, device)
    beside = [its for its in arrays if isinstance(its, DeviceArray)][0].beside
    found = [beside(each) for each in arrays]
    for each in found if device.type == "cuda" else ():
        # It may be of another stream.
        each.tensor.record_stream(torch.cuda.current_stream(device))
    joined: Any = np.concatenate(found)
    return joined.tensor


def late(numbers: torch.Tensor, use: Callable[[List[Any]], Sequence[Any]]) -> Late:
    """A tensor's numbers, once they have come to the CPU, as `use` turns them into results."""
    landed = landing(numbers)
    return Late(lambda: use(landed().tolist()))


_TORCH_TYPES = {  # which has no unsigned ones
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,
}


@functools.lru_cache(maxsize=256)
def _blocks(sizes: Tuple[int, ...], length: int, device: torch.device, stream: Any) -> Blocks:
    """As `blocks`. stream: the number of the current one, on which alone they can be used: on
    another one the copy may not have arrived."""
    counts = [-(-size // length) for size in sizes]
    return Blocks(
        copied([np.repeat(np.arange(len(sizes)), counts)], device),
        (np.cumsum(counts) - counts).tolist(),
    )


def blocks(sizes: Sequence[int], device: torch.device, length: int = BLOCK) -> Blocks:
    """The blocks, of `length` elements, of tensors with so many elements."""
    return _blocks(tuple(sizes), length, device, stream_of(device))


def largest(
    program: Any, rows: Sequence[Row], *shared: Any, BLOCK: int = BLOCK, **constants: Any
) -> torch.Tensor:
    """`launch`, of a program whose last array takes a number of each block. Of each tensor, the
    largest of them, on the device."""
    device = next(each.device for each in rows[0] if isinstance(each, torch.Tensor))
    dealt = blocks([size for size, *_ in rows], device, BLOCK)
    numbers = dealt.new()
    launch(program, rows, *shared, numbers, BLOCK=BLOCK, **constants)
    return dealt.largest(numbers)


def launch(
    program: Any, rows: Sequence[Row], *shared: Any, BLOCK: int = BLOCK, **constants: Any
) -> None:
    """Starts a program for several tensors, on the current stream. rows: of each tensor the number
    of its elements, or words, and the program's arguments for it, tensors, integers or floats;
    shared: the arguments for all of them, at least one tensor, which is the first."""
    (sizes, *columns), device = zip(*rows), shared[0].device
    owners, firsts = blocks(sizes, device, BLOCK)
    if len(owners):
        table = np.array([sizes, firsts, *map(_numbers, columns)], np.int64).T
        constants.update(COLUMNS=table.shape[1], BLOCK=BLOCK, enable_fp_fusion=False)
        # Triton launches on the device that is current.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            its = _table(table.tobytes(), device, stream_of(device))
            program[(len(owners),)](its, owners, *shared, **constants)


@functools.lru_cache(maxsize=256)
def _table(numbers: bytes, device: torch.device, stream: Any) -> torch.Tensor:
    """A table on the device, which is there already where nothing has changed in it. stream: as of
    `_blocks`."""
    return copied([np.frombuffer(numbers, np.int64)], device)


def _numbers(column: Row) -> Any:
    """A column of a table: addresses, integers, or the bits of floats."""
    if isinstance(column[0], torch.Tensor):
        return [tensor.data_ptr() for tensor in column]
    return np.array(column, np.float32).view(np.int32) if isinstance(column[0], float) else column


def magnitudes(bits: torch.Tensor) -> Late:
    """Magnitudes by their bits, infinity for NaN."""
    return late(
        bits, lambda found: np.array(found, np.int32).clip(max=INFINITY).view(np.float32).tolist()
    )
