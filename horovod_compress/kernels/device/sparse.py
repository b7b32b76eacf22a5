"""Sparse payloads: decoded on the host, added on the device."""
import numpy as np
import torch

from .. import host
from . import programs
from .array import DeviceArray
from .dense import are_finite, peaks_beside


def decode_add_sparse(out: DeviceArray, body: np.ndarray, *, scale: float) -> bool:
    """out[indices] += scale·values of a sparse body, in place. Raises ValueError, and changes nothing, for an invalid body. Returns whether the new
    elements are finite."""
    indices, values = host.decode_sparse(body, numel=out.size)
    count = len(indices)
    entries = torch.empty((2, count), dtype=torch.int32, pin_memory=out.tensor.is_cuda)
    entries[0] = torch.from_numpy(indices.view(np.int32))
    entries[1] = torch.from_numpy(values.view(np.int32))
    at, bits = entries.to(out.tensor.device, non_blocking=True)
    peaks = peaks_beside(out.tensor, count)
    programs.launch(programs.add_entries, count, out.tensor, at, bits.view(torch.float32), peaks, scale)
    return are_finite(peaks)
