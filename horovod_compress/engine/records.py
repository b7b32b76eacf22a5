"""What compressions tell of their steps: dictionaries, with the keys that each has."""

from typing import Any, Dict, Optional, TypedDict


class TensorStats(TypedDict):
    """What was sent of a tensor since the start: see `Driver.stats_by_tensor`."""

    bytes_sent: int
    dense_bytes: int
    elements_sent: int


class Counted(TensorStats):
    """What is counted of each step."""

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
    """What a record has of all tensors, and of each: counts since the record before, and norms,
    None where they are unknown or not finite."""

    ratio: Optional[float]
    gradient_norm: Optional[float]
    residual_norm: Optional[float]


class TensorRecord(Counts):
    """What a record has of a tensor."""

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
    """What a recorded step did: see `Recorder`. tensors: where they are recorded one by one."""

    tensors: Dict[str, TensorRecord]


class Candidate(TypedDict, total=False):
    """What auto() has found of a candidate. seconds: the median step; steps: how many counted;
    error: the share of the first gradient's squared norm that it held back."""

    seconds: Optional[float]
    steps: int
    error: float


class Plan(TypedDict):
    """What auto() has found. spec: the candidate that was chosen, or None; candidates: by spec."""

    spec: Optional[str]
    ranks: int
    candidates: Dict[str, Candidate]
