"""Records of a compression's steps, for files, callables and TensorBoard; and a warning where what
is kept of gradients only grows."""

import contextlib
import json
import math
import os
import time
import warnings
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
    cast,
)

from .. import kernels
from ..compressors.base import Compressor, Step
from .driver import Driver
from .feature import Feature
from .record_types import Record, TensorRecord
from .tensor import SENT, SPENT, Tensor

FORMAT = "horovod_compress.record/1"
Destination = Union[str, "os.PathLike[str]", Callable[[Record], Any], Any]
# After which what is kept has come to its plateau; a turnover is as many steps as it takes to send
# all elements once.
_STEPS, _TURNOVERS = 1000, 10
# From the second eighth of all records to the fourth, and from there to the last.
_GROWTH = 1.3
_MOST = 256  # records that are compared
_MOST_NUMBER = 10**100
# What a record counts since the one before.
_COUNTED = ("steps", "steps_undone", "seconds", *SENT, *SPENT)


class Recorder(Feature):
    """Writes what recorded steps did.

    to: a path, to which a line of JSON is appended for each record; with {rank} in it every rank
    has its own, else only the first rank writes. Or
        a callable that takes a record, a dict; or an object with add_scalar(tag, value, step), as
        TensorBoard's SummaryWriter; both on each rank that has given one.
    every: steps whose number is a multiple are recorded. Norms take a pass over gradients and
    residuals in these, and nothing in others. by_tensor: a record has "tensors", the same by
    tensor.

    A record has bytes, seconds and elements since the one before, or since the start ("steps" says
    how many steps these are); norms of the recorded step's gradient, without loss scale and before
    it is compressed, and of what this rank keeps after it. (Small tensors that TensorFlow reduces
    directly count with the norm of the mean, and how long it waits is not known there.)
    docs/guides/tune.md lists the keys.

    Where an operating system's error keeps a record from being written, as on a full disk, training
    goes on. There is a warning the first time, and the next record that can be written has the
    counts of those that could not.
    """

    def __init__(
        self, driver: Driver, to: Destination, every: int = 10, by_tensor: bool = False
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, not {every!r}")
        to = os.path.expanduser(to) if isinstance(to, (str, os.PathLike)) else to
        if not isinstance(to, str) and not callable(to) and not hasattr(to, "add_scalar"):
            raise TypeError(
                f"records go to a path, a callable or an object with add_scalar(tag, value, step), "
                f"not to an object of {type(to)}"
            )
        self._driver, self._to, self._every, self._by_tensor = driver, to, every, by_tensor
        self._before = self._totals()
        # Of the recorded step's gradients: the tensors of each group, and their squared norms.
        self._begun: Dict[str, Tuple[Sequence[Tensor], Sequence[float]]] = {}
        self._squares: Dict[str, float] = {}
        self._growth = Growth()
        self._warned = False

    def wants(self, step: int) -> bool:
        """Returns whether the step of this number is recorded."""
        return step % self._every == 0

    def concerns(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> bool:
        return self.wants(steps[0].index)

    def begin(
        self, tensors: Sequence[Tensor], grads: Sequence[Any], steps: Sequence[Step]
    ) -> Sequence[Step]:
        gradients = [
            grad if step.base is None else grad - step.base for grad, step in zip(grads, steps)
        ]
        squares = kernels.then(
            kernels.squared_norms(gradients),
            lambda found: [its * steps[0].scale ** 2 for its in found],
        )
        self._begun[tensors[0].name] = tensors, squares
        return steps

    def step_ended(self) -> None:
        """Records the last step, where it is one to be recorded. Nothing may be under way."""
        driver = self._driver
        taken = driver.steps_taken()
        step = (max(taken.values(), default=0) if isinstance(taken, Mapping) else taken) - 1
        if step < 0 or not self.wants(step) or driver.under_way:
            return
        # Ends the step, and brings residuals up to date.
        driver.arrays()
        totals = self._totals()
        if totals["steps"] == self._before["steps"]:  # it was recorded
            return
        self._squares = {
            tensor.name: its for begun in self._begun.values() for tensor, its in zip(*begun)
        }
        self._begun.clear()
        record: Any = {
            "format": FORMAT,
            "step": step,
            "time": time.time(),
            "rank": driver.now.rank,
            "size": driver.now.size,
            "spec": driver.tensors.compressor.config,
            **self._since(self._before, totals, _COUNTED, list(driver.tensors)),
        }
        if self._by_tensor:
            record["tensors"] = {t.name: self._of_tensor(t) for t in driver.tensors}
        try:
            self._write(record)
            self._before = totals
        except OSError as error:
            self._warn(step, error)
        self._growth.watch(record, driver)

    def _totals(self) -> Dict[str, Any]:
        by_tensor = {tensor.name: dict(tensor.counters) for tensor in self._driver.tensors}
        return {**self._driver.totals(), "seconds": time.perf_counter(), "tensors": by_tensor}

    def _of_tensor(self, tensor: Tensor) -> TensorRecord:
        before, now = self._before["tensors"].get(tensor.name, {}), tensor.counters
        record = {
            "numel": tensor.numel,
            "compressor": tensor.compressor.id or type(tensor.compressor).__name__,
            **self._since(before, now, now, [tensor]),
        }
        return cast(TensorRecord, record)

    def _since(
        self,
        before: Mapping[str, Any],
        now: Mapping[str, Any],
        keys: Iterable[str],
        tensors: Collection[Tensor],
    ) -> Dict[str, Any]:
        """The counts since the record before, and the norms over tensors, without loss scale;
        None where they are unknown, or not finite."""
        counted = {key: now[key] - before.get(key, 0) for key in keys}
        gradients = [self._squares[t.name] for t in tensors if t.name in self._squares]
        residuals = [
            residual for residual in (its.residual for its in tensors) if residual is not None
        ]
        sent = counted["bytes_sent"]
        return {
            **counted,
            "ratio": counted["dense_bytes"] / sent if sent else None,
            "gradient_norm": _root(gradients),
            "residual_norm": _root(kernels.squared_norms(residuals)),
        }

    def _write(self, record: Record) -> None:
        if isinstance(self._to, str):
            if record["rank"] == 0 or "{rank}" in self._to:
                _append(self._of_rank(self._to), json.dumps(record, allow_nan=False) + "\n")
        elif hasattr(self._to, "add_scalar"):
            for tag, value in _scalars("compression", record):
                self._to.add_scalar(tag, value, record["step"])
        else:
            self._to(record)

    def _of_rank(self, path: str) -> str:
        return path.replace("{rank}", str(self._driver.now.rank))

    def _warn(self, step: int, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            to = self._of_rank(self._to) if isinstance(self._to, str) else repr(self._to)
            warnings.warn(
                f"horovod_compress: the record of step {step} cannot be written to {to}: "
                f"{error.strerror or error}. Training goes on, and later records are tried",
                RuntimeWarning,
                stacklevel=2,
            )


def _append(path: str, line: str) -> None:
    """Appends a line to a file, all of it or, with an OSError, nothing."""
    # Unbuffered, because closing would try once more to write what is left in a buffer.
    with open(path, "a+b", buffering=0) as file:
        size, left = _without_cut_record(file), line.encode()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _without_cut_record(file: Any) -> int:
    """Takes away a record that was cut off, which a process that was killed has left at the end of
    a file. Returns the file's size."""
    size = os.fstat(file.fileno()).st_size
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        file.seek(0)
        whole, _, rest = file.read().rpartition(b"\n")
        # What is none was not written here, and stays.
        if rest.startswith(b'{"format"'):
            size -= len(rest)
            file.truncate(size)
    return size


class _Point(NamedTuple):
    step: int
    residual: float
    gradient: float


class Growth:
    """Watches for what is kept to grow without end, and warns once. It grows at first, until as
    much is sent as comes: that takes some times as many steps as it takes to send all elements
    once. After those it goes on growing where its norm, and that over the gradient's, have grown
    from each eighth of all records to the next, and by `_GROWTH` whenever the number of steps has
    doubled. Nothing sent is no excuse."""

    def __init__(self) -> None:
        self._warned = False
        self._compressor: Optional[Compressor] = None  # which the points are of

    def watch(self, record: Record, driver: Driver) -> None:
        """Takes a record of this driver into account."""
        kept = [tensor for tensor in driver.tensors if tensor.residual is not None]
        sent = sum(tensor.counters["elements_sent"] for tensor in kept)
        numel = sum(tensor.numel for tensor in kept)
        if driver.tensors.compressor is not self._compressor:
            self._compressor = driver.tensors.compressor
            self._points: List[_Point] = []
            # The step and what had been sent when it began.
            self._first, self._sent_before = record["step"], sent
            # Only one of so many records is compared, so that these are not too many.
            self._stride, self._until_next = 1, 0
        self._until_next -= 1
        if self._until_next >= 0:
            return
        self._until_next = self._stride - 1
        if self._warned or not record["residual_norm"] or not record["gradient_norm"]:
            return
        self._points.append(
            _Point(record["step"], record["residual_norm"], record["gradient_norm"])
        )
        steps = record["step"] - self._first
        turnovers = (sent - self._sent_before) / max(numel, 1)
        if steps >= _STEPS and (turnovers >= _TURNOVERS or not turnovers) and self._has_grown():
            self._warned = True
            middle, last = self._points[len(self._points) // 2], self._points[-1]
            warnings.warn(
                f"horovod_compress: what {driver.tensors.compressor.id} keeps of gradients goes on "
                f"growing: its norm is {last.residual:.3g} at step "
                f"{last.step}, {last.residual / last.gradient:.3g} times a gradient's, and was "
                f"{middle.residual:.3g} at step {middle.step}. Send "
                "more (a larger ratio, a smaller tau), or what comes in the end is too old to help",
                RuntimeWarning,
                stacklevel=2,
            )
        if len(self._points) > _MOST:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def _has_grown(self) -> bool:
        size = len(self._points) // 8
        if not size:
            return False
        for value in (lambda p: p.residual, lambda p: p.residual / p.gradient):
            means = [
                sum(map(value, self._points[i * size : (i + 1) * size])) / size for i in range(8)
            ]
            if (
                any(after <= before for before, after in zip(means[1:], means[2:]))
                or not means[1] * _GROWTH <= means[3] <= means[7] / _GROWTH
            ):
                return False
        return True


def _root(squares: Sequence[float]) -> Optional[float]:
    total = sum(squares)
    return math.sqrt(total) if squares and math.isfinite(total) else None


def _scalars(tag: str, values: Mapping[str, Any]) -> Any:
    """(tag, number) of all numbers in a record."""
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "spec":
            yield from _scalars(f"{tag}/{key}", value)
        elif isinstance(value, (int, float)) and key not in (
            "step",
            "time",
            "rank",
            "size",
            "numel",
        ):
            yield f"{tag}/{key}", value


def read(path: Union[str, "os.PathLike[str]"]) -> List[Record]:
    """The records in a file.

    Args:
        path: of a file of JSON lines. The last one may have been cut off, and is left out then.

    Returns:
        The records, as docs/guides/tune.md lists their keys.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no record; in one line, with the file and the line's number.
    """
    with open(os.path.expanduser(path), "rb") as file:
        lines = file.read().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            wrong = _wrong(record)
        except (ValueError, RecursionError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            raise ValueError(
                f"{path}, line {number}: not a record of this version of horovod-compress: {wrong}"
            )
        records.append(record)
    return records


def _wrong(record: Any) -> Optional[str]:
    """The part that a record must have and has not, as `Recorder` writes it."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return f"its format is not {FORMAT}"
    spec, tensors = record.get("spec"), record.get("tensors", {})
    if not isinstance(spec, dict) or not isinstance(spec.get("id"), str):
        return "spec is missing or not valid"
    if not isinstance(tensors, dict) or not all(isinstance(t, dict) for t in tensors.values()):
        return "tensors are not valid"
    missing = _not_numbers(record, ("step", "rank", "size", *_COUNTED))
    for tensor in tensors.values():
        missing = missing or _not_numbers(tensor, ("numel", *SENT, *SPENT))
        if not isinstance(tensor.get("compressor"), str):
            missing = missing or ["compressor"]
    return f"{missing[0]} is missing or not valid" if missing else None


def _not_numbers(record: Dict[str, Any], keys: Sequence[str]) -> List[str]:
    """Those of the keys whose values are no numbers, and of the norms, which may be None."""
    norms = [key for key in ("gradient_norm", "residual_norm") if record.get(key, "") is not None]
    return [key for key in (*keys, *norms) if not _is_number(record.get(key))]


def _is_number(value: Any) -> bool:
    """Returns whether that is a number with which one can reckon: JSON's may have any size, or be
    NaN."""
    return type(value) in (int, float) and -_MOST_NUMBER < value < _MOST_NUMBER
