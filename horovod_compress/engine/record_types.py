"""Statistics and records of steps: dictionaries, with the keys that each has."""

from typing import Any, Dict, Optional, TypedDict


class TensorStats(TypedDict):
    """Counts of what was sent of a tensor since the start, without what transports add: see
    `Tensors.stats_by_name`."""

    bytes_sent: int
    dense_bytes: int
    elements_sent: int


class Counted(TensorStats):
    """Counts of steps."""

    bytes_received: int
    encode_seconds: float
    exchange_seconds: float
    decode_seconds: float


class Stats(Counted):
    """A rank's totals since the start: see `Driver.stats`."""

    steps: int
    steps_undone: int
    ratio: float
    residual_norm: float
    overflows: int


class Counts(Counted):
    """The part of a record that is of all tensors, or of one: counts since the record before, and
    norms, None where they are unknown or not finite."""

    ratio: Optional[float]
    gradient_norm: Optional[float]
    residual_norm: Optional[float]


class TensorRecord(Counts):
    """The part of a record that is of one tensor."""

    numel: int
    compressor: str


class _Record(Counts):
    format: str
    step: int
    time: float
    rank: int
    size: int
    spec: Dict[str, Any]
    steps: int
    steps_undone: int
    seconds: float


class Record(_Record, total=False):
    """The record of a step: see `Recorder`. tensors: where they are recorded one by one."""

    tensors: Dict[str, TensorRecord]


class Candidate(TypedDict, total=False):
    """A candidate that auto() has tried. seconds: the median step; steps: how many counted."""

    seconds: Optional[float]
    steps: int


class Plan(TypedDict):
    """The result of auto(). spec: the candidate that was chosen, or None; ranks: how many took
    part; candidates: what was measured, by spec."""

    spec: Optional[str]
    ranks: int
    candidates: Dict[str, Candidate]
