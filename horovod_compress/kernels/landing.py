"""Copies to the CPU that nobody waits for before they are read."""

from typing import Callable

import numpy as np
import torch


def landing(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Begins to copy a tensor to the CPU, in the order of the current stream. Returns a function
    that waits for the copy, and returns it as a NumPy array."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def landed() -> np.ndarray:
        if event is not None:
            event.synchronize()
        return copy.numpy()

    return landed
