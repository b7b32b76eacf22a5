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

import dataclasses
from typing import Iterable, List, Optional, Tuple

import numpy as np

from ..engine.lockstep import Named

ALGORITHMS = ("dcd", "ecd", "choco", "exact")


@dataclasses.dataclass
class Copies:
    """A rank's copies of a tensor, flat float64 arrays: `public`, its public copy x̂; `mixed`,
    W x̂ of all ranks; `own`, x as the last exchange has left it, which is `public` in DCD and where
    exchanges are exact, and which CHOCO does not need.

    In float32 the sums of a rank and of its neighbors would be rounded differently, and x would
    move by the difference between `mixed` and W x̂ in every exchange.
    """

    public: np.ndarray
    mixed: np.ndarray
    own: Optional[np.ndarray]

    @classmethod
    def of(cls, algorithm: str, x: np.ndarray) -> "Copies":
        """Those of parameters that all ranks have alike."""
        own = {name: x.astype(np.float64) for name in names_of_arrays(algorithm)}
        return cls.from_arrays(algorithm, own)

    @classmethod
    def from_arrays(cls, algorithm: str, arrays: Named) -> "Copies":
        """Those of which `arrays` has returned this."""
        others = None if algorithm == "choco" else arrays["public"]
        return cls(arrays["public"], arrays["mixed"], arrays.get("own", others))

    def arrays(self) -> Named:
        """By name, each once."""
        found = {"public": self.public, "mixed": self.mixed}
        if self.own is not None and self.own is not self.public:
            found["own"] = self.own
        return found


# What is not finite is looked for later.
def names_of_arrays(algorithm: str) -> List[str]:
    """The keys of `Copies.arrays` with an algorithm."""
    return ["mixed", "public"] + ["own"] * (algorithm == "ecd")


@np.errstate(over="ignore", invalid="ignore")
def message(
    algorithm: str, x: np.ndarray, copies: Copies, t: int, out: np.ndarray, spare: np.ndarray
) -> None:
    """Writes z, which is to be compressed, into `out`.

    Args:
        algorithm: one of ALGORITHMS.
        x: the parameters after the local step, x + Δ, float32. They are left as they are.
        copies: of this tensor.
        t: the number of the exchange, from 1.
        out, spare: float32, as long as x.
    """
    if copies.own is None:
        np.subtract(x, copies.public, out=out)
        return
    # Δ first: it is zero where the optimizer has added nothing to what x was in float32.
    np.copyto(spare, copies.own, casting="same_kind")
    np.subtract(x, spare, out=out)
    if algorithm == "exact":
        out += copies.mixed
        return
    np.subtract(copies.mixed, copies.own, out=spare)
    out += spare
    if algorithm == "ecd":
        out *= np.float32(t / 2)
        out += copies.own


def mix(
    algorithm: str,
    copies: Copies,
    t: int,
    arrived: Iterable[Tuple[float, np.ndarray]],
    out: np.ndarray,
    wide: np.ndarray,
) -> None:
    """Writes W x̂ after the exchange into `out`.

    Args:
        algorithm, copies, t: as for `message`. Copies are left as they are.
        arrived: (weight, C(z) in float32) of this rank and its neighbors. The next one may be in
            the memory of the last.
        out, wide: float64, as long as x.
    """
    keep, gain = _factors(algorithm, t)
    before = copies.mixed if keep == 1 else np.multiply(copies.mixed, keep, out=out)
    for weight, sent in arrived:
        # The same numbers go into every rank's copy, whatever its weight.
        np.multiply(sent, gain * weight, out=wide, dtype=np.float64)
        before = np.add(before, wide, out=out)


def merge(
    algorithm: str,
    x: np.ndarray,
    copies: Copies,
    t: int,
    zeta: float,
    sent: np.ndarray,
    mixed: np.ndarray,
    wide: np.ndarray,
) -> None:
    """Makes the copies, and x, what they are after the exchange.

    Args:
        algorithm, x, copies, t: as for `message`. x becomes the parameters after the exchange.
        zeta: ζ, CHOCO's step.
        sent: C(z) of this rank, in float32. It is used up.
        mixed: of `mix`. The copies have it from now on.
        wide: memory of float64, as long as x.
    """
    keep, gain = _factors(algorithm, t)
    if keep != 1:
        copies.public *= keep
    np.multiply(sent, gain, out=wide, dtype=np.float64)
    copies.public += wide
    if algorithm == "ecd" and copies.own is not None:
        np.copyto(sent, copies.own, casting="same_kind")
        np.subtract(x, sent, out=sent)
        np.add(copies.mixed, sent, out=copies.own)
        np.copyto(x, copies.own, casting="same_kind")
    copies.mixed = mixed
    if copies.own is copies.public:
        np.copyto(x, copies.public, casting="same_kind")
    elif copies.own is None:
        np.subtract(mixed, copies.public, out=sent)
        sent *= np.float32(zeta)
        x += sent


def _factors(algorithm: str, t: int) -> Tuple[float, float]:
    """Those of the old copy and of C(z) in the new one."""
    return {"exact": (0.0, 1.0), "ecd": (1 - 2 / t, 2 / t)}.get(algorithm, (1.0, 1.0))


def undo(x: np.ndarray, copies: Copies) -> None:
    """Takes the local step back. CHOCO does not know what was before: there, what is not finite
    becomes the public copy."""
    if copies.own is not None:
        np.copyto(x, copies.own, casting="same_kind")
    else:
        np.copyto(x, copies.public, where=~np.isfinite(x), casting="same_kind")
