"""The graph of ranks in decentralized training, with its weights."""

import functools
import math
import numbers
import zlib
from typing import Any, Dict, List

import numpy as np

_NAMES = ("ring", "torus", "complete")
# How far rows may be from 1, and from symmetric, in a matrix that a user gives.
_TOLERANCE = 1e-6


class Topology:
    """A graph of ranks with the weights of its gossip.

    Args:
        given: "ring"; "torus", a grid as square as the number of ranks allows, whose borders meet,
            which for a prime number is a ring; "complete", every rank with every other; or a matrix
            W of weights, symmetric, not negative, with rows that sum to 1.
        size: the number of ranks.

    Raises:
        ValueError: no such topology, or no matrix with which ranks come to agree.

    Attributes:
        size: the number of ranks.
        name: of the topology, "matrix" where a user has given one.
        weights: W, float64 of (size, size).
        rho: max(|λ₂|, |λ_N|) of the eigenvalues of W in descending order: the factor by which one
            exact exchange brings ranks together, at worst.
    """

    def __init__(self, given: Any, size: Any) -> None:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"ranks must be a number of ranks, 1 or more, not {size!r}")
        self.size: int = int(size)
        if isinstance(given, str):
            if given not in _NAMES:
                raise ValueError(
                    f"topology must be one of {', '.join(_NAMES)}, or a matrix of weights, not "
                    f"{given!r}"
                )
            self.name, self.weights = given, metropolis(_linked(given, self.size))
        else:
            self.name, self.weights = "matrix", _checked(given, self.size)
        values = np.linalg.eigvalsh(self.weights)[:-1]
        self.rho = float(np.abs(values).max(initial=0.0))
        if self.rho > 1 - 1e-9:
            raise ValueError(
                "topology: with these weights ranks' differences never become smaller (an "
                "eigenvalue is -1, or 1 a second time): give ranks a weight of their own, and "
                "those that exchange larger ones"
            )

    def neighbors(self, rank: int) -> List[int]:
        """The ranks that a rank exchanges with, ascending."""
        return [int(other) for other in np.flatnonzero(self.weights[rank]) if other != rank]

    @functools.cached_property
    def diameter(self) -> int:
        """The most exchanges that it takes until a rank knows what another one does."""
        reached, exchanges = np.eye(self.size, dtype=bool), 0
        while not reached.all():
            reached |= self.weights @ reached > 0
            exchanges += 1
        return exchanges

    def description(self) -> Dict[str, Any]:
        """The name and a checksum of the weights, JSON-able, for ranks to compare."""
        return {"name": self.name, "weights": zlib.crc32(self.weights.tobytes())}


def metropolis(linked: np.ndarray) -> np.ndarray:
    """The Metropolis weights of a graph: 1/(1 + max(dᵢ, dⱼ)) for ranks that exchange, of degrees dᵢ
    and dⱼ, and what is left to 1 for a rank itself. float64 of (size, size), as `linked`, which is
    1 where two different ranks exchange, and 0 elsewhere."""
    degrees = linked.sum(axis=1)
    weights = linked / (1 + np.maximum.outer(degrees, degrees))
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return weights


def _linked(name: str, size: int) -> np.ndarray:
    """The adjacency matrix of a topology, as `metropolis` takes it."""
    linked = np.full((size, size), float(name == "complete"))
    rows = 1
    if name == "torus":
        rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    grid = np.arange(size).reshape(rows, -1)
    for axis in (0, 1):
        neighbor = np.roll(grid, -1, axis)
        linked[grid, neighbor] = linked[neighbor, grid] = 1
    np.fill_diagonal(linked, 0)
    return linked


def _checked(given: Any, size: int) -> np.ndarray:
    """A user's weights. ValueError, which names the ranks, for what does not suit."""
    try:
        # Of a tensor of torch's that requires a gradient NumPy makes no array.
        weights = np.array(given.detach() if hasattr(given, "detach") else given, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"topology: not a matrix of numbers: {given!r}") from None
    if weights.shape != (size, size):
        raise ValueError(
            f"topology: a matrix for {size} ranks has the shape {(size, size)}, not {weights.shape}"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("topology: weights must be finite, and not negative")
    different = np.argwhere(np.abs(weights - weights.T) > _TOLERANCE)
    if different.size:
        i, j = different[0].tolist()
        raise ValueError(
            f"topology: the matrix must be symmetric: ranks {i} and {j} have {weights[i, j]:g} and "
            f"{weights[j, i]:g} for each other"
        )
    # As computed matrices have them: a rank's neighbors have that rank as theirs.
    weights = (weights + weights.T) / 2
    weights[weights <= _TOLERANCE] = 0
    sums = weights.sum(axis=1)
    wrong = np.flatnonzero(np.abs(sums - 1) > _TOLERANCE)
    if wrong.size:
        raise ValueError(
            f"topology: the weights of rank {wrong[0]} sum to {sums[wrong[0]]:g}, and must to 1"
        )
    reached, reach = {0}, {0}
    while reach:
        reach = {int(j) for i in reach for j in np.flatnonzero(weights[i])} - reached
        reached |= reach
    apart = sorted(set(range(size)) - reached)
    if apart:
        raise ValueError(
            f"topology: ranks {', '.join(map(str, apart))} are not connected with rank 0"
        )
    # To the last bit, or the mean would shrink or grow.
    np.fill_diagonal(weights, np.diag(weights) + 1 - sums)
    return weights
