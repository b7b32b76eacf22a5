"""Residuals that follow the learning rate γ, where an algorithm has the option `follow_lr`."""

import dataclasses
from typing import Optional

import numpy as np

from .base import NO_RATE, Compressor

# So that the residual stays finite.
_MOST_GROWTH = 2.0**100


def growth(last: np.ndarray, lr: Optional[float]) -> float:
    """The factor by which a step multiplies the residual: γ of the step before over γ of this one.

    At γ = 0 the optimizer applies nothing, so such a step counts as one with the γ before. What was
    kept before the first γ is known, is dropped.

    Args:
        last: float64 of (1,), the γ that the residual is meant for, 0 before the first. It becomes
            `lr`.
        lr: of this step; None or NaN where it is unknown.
    """
    if lr is None or not lr >= NO_RATE:
        return 1.0
    before, last[0] = float(last[0]), lr
    return min(before / lr, _MOST_GROWTH)


def grow(residual: np.ndarray, factor: float) -> None:
    """Multiplies a residual, float32, by what `growth` has returned, in place."""
    if factor != 1:
        residual *= np.float32(factor)
        np.clip(residual, -_MOST_GROWTH, _MOST_GROWTH, out=residual)


def decide_follow_lr(compressor: Compressor, known: bool, default: bool) -> Compressor:
    """The compressor with `follow_lr` decided, by `default` where the user left it open. known:
    whether every step will have a learning rate. Raises ValueError where `follow_lr` needs one and
    there is none."""
    follow_lr = compressor.policy.follow_lr
    if follow_lr and not known:
        raise ValueError(
            f"{compressor.id}: follow_lr needs the optimizer, whose learning rate it follows"
        )
    # An option only of some.
    return (
        dataclasses.replace(compressor, **{"follow_lr": default})
        if follow_lr is None
        else compressor
    )
