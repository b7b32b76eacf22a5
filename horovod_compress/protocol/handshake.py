"""All ranks compare their configurations before they exchange anything that depends on them. Their
steps' numbers are compared where sums are, which do not carry those."""

import contextlib
import hashlib
import json
import reprlib
import threading
import warnings
from typing import Any, Callable, Iterator, List, Optional, Protocol, Tuple

import numpy as np


class MismatchError(RuntimeError):
    """The ranks were started with different options, models or versions."""


class AnyTransport(Protocol):
    """The part of a transport that comparisons and means over ranks need, also of TensorFlow's."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        """As in `Transport`."""

    def allreduce(self, name: str, array: np.ndarray) -> Callable[[], np.ndarray]:
        """As in `Transport`, also of float64 in any shape."""


# Seconds, after which ranks that wait for others say so.
STALLED = 60.0
_FIRST_GRADIENT = "come to their first gradient with this compression"
_SAME_START = (
    "Start all ranks with the same model, compression options, kernels and version of "
    "horovod-compress, and let several compressions have their first gradients in one order on all"
)


@contextlib.contextmanager
def warning_when_stalled(message: str) -> Iterator[None]:
    """Warns once, with the message, where the body of the `with` statement takes longer than a
    minute."""
    text = f"horovod_compress: waiting for {STALLED:g} s already: {message}"
    timer = threading.Timer(STALLED, warnings.warn, (text, RuntimeWarning))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def agree(
    transport: AnyTransport,
    label: str,
    description: Any,
    what: str = _FIRST_GRADIENT,
    advice: str = _SAME_START,
) -> None:
    """Compares the ranks' descriptions, nested JSON-able values, and blocks until all ranks are
    here. what: what all ranks must have done to get here; advice: how to proceed where descriptions
    differ. Raises MismatchError, on every rank alike, which names the first rank that differs from
    rank 0 and the difference. Digests travel first, and whole descriptions only where digests
    differ."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
    with warning_when_stalled(
        f"not all {transport.size} ranks have {what} yet (collective {label}.digest)"
    ):
        digests = transport.allgather(
            f"{label}.digest", np.frombuffer(digest, np.uint8).copy()
        )().reshape(transport.size, -1)
    if (digests == digests[0]).all():
        return
    descriptions = gather(transport, f"{label}.description", description)
    for rank, other in enumerate(descriptions):
        difference = first_difference(descriptions[0], other)
        # 0 and 0.0 are written differently, and are the same.
        if difference:
            where, expected, found = difference[0], *shown(*difference[1:])
            raise MismatchError(
                f"rank {rank} differs from rank 0 in {where}: {found} on rank {rank}, {expected} "
                f"on rank 0. {advice}"
            )


def gather(transport: AnyTransport, name: str, value: Any) -> List[Any]:
    """The ranks' values, nested and JSON-able, in rank order."""
    line = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8).copy()
    texts = transport.allgather(name, line)().tobytes().split(b"\n")
    return [json.loads(text) for text in texts[: transport.size]]


class Words(str):
    """Says what is right, where that is shown in place of a value that would be."""

    __repr__ = str.__str__


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def shown(*values: Any) -> List[str]:
    """Values that differ, for a message: short, in one line, and in quotes where types differ.

    Args:
        values: of any types.

    Returns:
        A text for each.
    """
    if all(type(each) is str and each.isprintable() and len(each) <= 200 for each in values):
        return list(values)
    return [" ".join(_short.repr(each).split()) for each in values]


def first_difference(expected: Any, found: Any, path: str = "") -> Optional[Tuple[str, Any, Any]]:
    """(where, expected, found) of the first difference of two nested values, or None."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in found or key not in expected:
                return (
                    where,
                    "there" if key in expected else "missing",
                    "there" if key in found else "missing",
                )
            difference = first_difference(expected[key], found[key], where)
            if difference:
                return difference
        return None
    try:
        alike = bool(expected == found)
    # An array, of which this asks every element.
    except (RuntimeError, ValueError):
        alike = False
    return None if alike else (path, expected, found)


def step_numbers(index: int) -> np.ndarray:
    """int64 whose sum over ranks says whether all ranks are at one step: once a step with sums,
    which do not carry their step's number as frames do, drivers exchange these before they use a
    sum. As in frames, of the number the low 32 bits travel; its square's sum may overflow."""
    low = index & 0xFFFFFFFF
    return np.array([1, low, low * low], np.uint64).view(np.int64)


def check_step_numbers(
    summed: np.ndarray, index: int, size: int, error_of_missing: Callable[[int, str], Exception]
) -> None:
    """MismatchError where ranks are at different steps, and an error as of `Transport` where some
    are gone."""
    ranks, total, squares = summed.tolist()
    if ranks != size:
        raise error_of_missing(size - ranks, "sums of this compression are wrong without them")
    # The sum of (x - y)^2 over all pairs of ranks: 0 for equal numbers only. Sums that overflowed
    # are right modulo 2^64, which it reaches only where numbers are 2^32 / N apart.
    if (ranks * squares - total * total) % 2**64:
        raise MismatchError(
            f"this rank is at step {index}, others are not: was a state loaded, or did training "
            f"begin, on some ranks only?"
        )
