"""Momentum that a scheduler changes while a compression trains, and that may begin at 0: a tensor
has an array for it from the first step on that needs one."""

from typing import Iterable

import numpy as np

from ..compressors.base import Compressor
from ..compressors.state import zeros
from .averaging import Arrays
from .tensor import Tensor


def follow(tensor: Tensor, compressor: Compressor) -> None:
    """Has a tensor go on under its compressor with another momentum, which may be its first.

    Args:
        tensor: between two steps.
        compressor: the tensor's, but for the momentum.
    """
    tensor.compressor = compressor
    if compressor.policy.m:
        _begin(tensor)


def _begin(tensor: Tensor) -> None:
    """Adds u, of which nothing is there yet, where it is missing."""
    residual = tensor.residual
    if "u" in tensor.compressor.roles and "u" not in tensor.state.arrays:
        tensor.state.arrays["u"] = zeros(tensor.numel if residual is None else residual.size)


def matched(tensors: Iterable[Tensor], arrays: Arrays) -> Arrays:
    """A state's arrays, with u of zeros where only the tensors have it. Where only the state has
    it, the tensors get it."""
    found = dict(arrays)
    for tensor in tensors:
        own, its = tensor.state.arrays.get("u"), arrays.get(tensor.name, {})
        if "u" in its:
            _begin(tensor)
        elif own is not None and tensor.name in arrays:
            found[tensor.name] = {**its, "u": np.zeros(own.size, np.float32)}
    return found
