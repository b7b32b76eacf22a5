"""Formulas of decentralized training: D-PSGD, DCD-PSGD and ECD-PSGD (Tang et al., NeurIPS 2018,
arXiv 1803.06443), and CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019, arXiv 1902.00340).

Each rank has a model x of its own. It sends its neighbors C(z), C being a compressor without error
feedback, by which all of them keep the same public copy x̂ of x. A rank needs no copy of each
neighbor, only their mean W x̂. Δ is what its optimizer has added to x since the last exchange, and
t is the number of the exchange, from 1.

    exact   y = W x̂ + Δ   z = y                       x̂ ← C(z)                   x ← x̂
    dcd     y = W x̂ + Δ   z = y − x̂                   x̂ ← x̂ + C(z)               x ← x̂
    ecd     y = W x̂ + Δ   z = (1 − t/2)x + (t/2)y     x̂ ← (1 − 2/t)x̂ + (2/t)C(z)   x ← y
    choco   y = x + Δ     z = y − x̂                   x̂ ← x̂ + C(z)    x ← y + ζ(W x̂ − x̂)

With an exact C the first three are D-PSGD, x ← W x + Δ.
"""

import numbers
from typing import Iterable, List, Optional, Tuple

import numpy as np

from ..engine.lockstep import Named

ALGORITHMS = ("dcd", "ecd", "choco", "exact")
# CHOCO's ζ, where none is given: with quantizers it trains as exact exchanges do.
STEP = 0.5


def zeta_of(algorithm: str, step: Optional[float]) -> float:
    """CHOCO's ζ. ValueError for what is no algorithm, or no step of it."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if step is None:
        return STEP
    if algorithm != "choco":
        raise ValueError(f"step is choco's, {algorithm} has none: leave it out")
    if isinstance(step, bool) or not isinstance(step, numbers.Real) or not 0 < step <= 1:
        raise ValueError(f"step must be a number above 0, at most 1, not {step!r}")
    return float(step)


def names_of_arrays(algorithm: str) -> List[str]:
    """The keys of `Copies.arrays` with an algorithm."""
    return ["mixed", "public"] + ["own"] * (algorithm == "ecd")


class Copies:
    """A rank's copies of a tensor. In float32 the sums of a rank and of its neighbors would be
    rounded differently, and x would move by the difference between `mixed` and W x̂ in every
    exchange.

    Args:
        algorithm: one of ALGORITHMS.
        arrays: those of which `arrays` has returned this.

    Attributes:
        public: its public copy x̂, a flat float64 array, as all of these are.
        mixed: W x̂ of all ranks.
        own: x as the last exchange has left it, which is `public` in DCD and where exchanges are
            exact, and which CHOCO does not need.
    """

    def __init__(self, algorithm: str, arrays: Named) -> None:
        self.algorithm = algorithm
        self.public, self.mixed = arrays["public"], arrays["mixed"]
        self.own = None if algorithm == "choco" else arrays.get("own", self.public)
        # `mixed` after the exchange, until all messages can be used.
        self._mixed = np.zeros(self.mixed.size)

    def arrays(self) -> Named:
        """By name, each once."""
        found = {"public": self.public, "mixed": self.mixed}
        if self.own is not None and self.own is not self.public:
            found["own"] = self.own
        return found

    # What is not finite is looked for later.
    @np.errstate(over="ignore", invalid="ignore")
    def message(self, x: np.ndarray, t: int, out: np.ndarray, spare: np.ndarray) -> None:
        """Writes z, which is to be compressed, into `out`.

        Args:
            x: the parameters after the local step, x + Δ, float32. They are left as they are.
            t: the number of the exchange, from 1.
            out, spare: float32, as long as x.
        """
        if self.own is None:
            np.subtract(x, self.public, out=out)
            return
        # Δ first: it is zero where the optimizer has added nothing to what x was in float32.
        np.copyto(spare, self.own, casting="same_kind")
        np.subtract(x, spare, out=out)
        if self.algorithm == "exact":
            out += self.mixed
            return
        np.subtract(self.mixed, self.own, out=spare)
        out += spare
        if self.algorithm == "ecd":
            out *= np.float32(t / 2)
            out += self.own

    def mix(self, t: int, arrived: Iterable[Tuple[float, np.ndarray]], wide: np.ndarray) -> None:
        """Computes W x̂ after the exchange, and leaves the copies as they are until `merge`.

        Args:
            t: as for `message`.
            arrived: (weight, C(z) in float32) of this rank and its neighbors. The next one may be
                in the memory of the last.
            wide: memory of float64, as long as x.
        """
        keep, gain = self._factors(t)
        before = self.mixed if keep == 1 else np.multiply(self.mixed, keep, out=self._mixed)
        for weight, sent in arrived:
            # The same numbers go into every rank's copy, whatever its weight.
            np.multiply(sent, gain * weight, out=wide, dtype=np.float64)
            before = np.add(before, wide, out=self._mixed)

    def merge(self, x: np.ndarray, t: int, zeta: float, sent: np.ndarray, wide: np.ndarray) -> None:
        """Makes the copies, and x, what they are after the exchange that `mix` has seen.

        Args:
            x, t: as for `message`. x becomes the parameters after the exchange.
            zeta: ζ, CHOCO's step.
            sent: C(z) of this rank, in float32. It is used up.
            wide: as for `mix`.
        """
        keep, gain = self._factors(t)
        if keep != 1:
            self.public *= keep
        np.multiply(sent, gain, out=wide, dtype=np.float64)
        self.public += wide
        if self.algorithm == "ecd" and self.own is not None:
            np.copyto(sent, self.own, casting="same_kind")
            np.subtract(x, sent, out=sent)
            np.add(self.mixed, sent, out=self.own)
            np.copyto(x, self.own, casting="same_kind")
        self.mixed, self._mixed = self._mixed, self.mixed
        if self.own is self.public:
            np.copyto(x, self.public, casting="same_kind")
        elif self.own is None:
            np.subtract(self.mixed, self.public, out=sent)
            sent *= np.float32(zeta)
            x += sent

    def undo(self, x: np.ndarray) -> None:
        """Takes the local step back. CHOCO does not know what was before: there, what is not
        finite becomes the public copy."""
        if self.own is not None:
            np.copyto(x, self.own, casting="same_kind")
        else:
            np.copyto(x, self.public, where=~np.isfinite(x), casting="same_kind")

    def _factors(self, t: int) -> Tuple[float, float]:
        """Those of the old copy and of C(z) in the new one."""
        its = {"exact": (0.0, 1.0), "ecd": (1 - 2 / t, 2 / t)}
        return its.get(self.algorithm, (1.0, 1.0))
