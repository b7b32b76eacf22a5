"""The time of a step's exchange: arithmetic on the load of a compression and the figures of a
network, both measured elsewhere."""

import dataclasses
import json
import math
import pathlib
from typing import Any, Callable, Dict, Optional

# Bytes of tensors that Horovod puts into one message.
FUSION = 64 * 2**20
# Seconds between two looks of Horovod's at what is to be exchanged.
_CYCLE = 1e-3
# Share of a link's rate that TCP leaves for content.
_GOODPUT = 0.95
# Seconds that a processor takes to hand one tensor to Horovod and back.
_OPERATION = 100e-6
# Seconds that processors take beside the link, for each byte that crosses it, under Gloo: sums of
# float16 are added one by one there.
_PROCESSOR = {
    "allreduce float32": 1e-9,
    "allreduce float16": 9e-9,
    "allreduce int32": 1e-9,
    "allreduce int64": 1e-9,
    "allgather uint8": 0.5e-9,
    "alltoall uint8": 0.5e-9,
}
# All that an algorithm may exchange, by verb and type.
COLLECTIVES = tuple(_PROCESSOR)
# Times a network, beyond which nobody asks what pays.
_FASTEST = 2.0**20
# Of which anything is predicted.
MOST_RANKS = 10**6
# Seconds, of what is no damaged file: some 30 years.
_LONGEST = 1e9


@dataclasses.dataclass(frozen=True)
class Load:
    """A compression's load in a step, on each rank.

    Attributes:
        exchanged: bytes that a rank hands in, by collective.
        operations: how many collectives of each, before Horovod fuses them.
        rounds: how often ranks agree on something before they send payloads.
        hides: whether payloads travel while backward goes on.
        last: share of the bytes that belong to the last gradient of a backward.
        encode: seconds.
        decode: seconds.
    """

    exchanged: Dict[str, float]
    operations: Dict[str, float]
    rounds: int
    hides: bool
    last: float
    encode: float
    decode: float

    @property
    def sent(self) -> float:
        """Bytes that a rank hands in, as `stats()` counts them."""
        return sum(self.exchanged.values())

    def received(self, ranks: int) -> float:
        """Bytes that come back to a rank, without those of its own that an allgather brings
        back, and of its own part of an alltoall."""
        times = {"allgather": ranks - 1, "alltoall": (ranks - 1) / ranks, "allreduce": 1}
        return sum(nbytes * times[kind.split()[0]] for kind, nbytes in self.exchanged.items())

    def crossing(self, network: "Network") -> float:
        """Bytes that cross a rank's link in each direction in a step, on this network."""
        return sum(nbytes * network.crossing(kind) for kind, nbytes in self.exchanged.items())

    def times(self, elements: float, tensors: float) -> "Load":
        """That of a model with so many times as many elements, in so many times as many tensors."""
        return dataclasses.replace(
            self,
            exchanged={kind: elements * nbytes for kind, nbytes in self.exchanged.items()},
            encode=elements * self.encode,
            decode=elements * self.decode,
            operations={kind: tensors * count for kind, count in self.operations.items()},
        )


@dataclasses.dataclass(frozen=True)
class Network:
    """The time that collectives take.

    Attributes:
        ranks: how many take part.
        latency: seconds of a collective of any size.
        operation: seconds for each tensor that is fused into one.
        seconds_per_byte: by collective, of a byte that crosses a rank's link in one direction.
    """

    ranks: int
    latency: float
    operation: float
    seconds_per_byte: Dict[str, float]

    @classmethod
    def of_link(cls, rate: float, latency: float) -> "Network":
        """One of two ranks that was not measured.

        Args:
            rate: of each rank's link in each direction, bits a second.
            latency: seconds of a message between two machines.
        """
        return cls(
            2,
            _CYCLE + 2 * latency,
            _OPERATION,
            {kind: 8 / (_GOODPUT * rate) + more for kind, more in _PROCESSOR.items()},
        )

    @classmethod
    def read(cls, path: str) -> "Network":
        """A network that `hvdcompress check --json` has measured.

        Raises:
            ValueError: the file is no such file. The message says what is wrong.
        """
        try:
            found = json.loads(pathlib.Path(path).expanduser().read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from None
        found = found.get("network") if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise ValueError(
                f"{path} has no network: write it with `hvdcompress check --json {path}` on two or "
                f"more ranks"
            )
        ranks, rates = found.get("ranks"), found.get("seconds_per_byte")
        right = {
            "ranks": type(ranks) is int and 2 <= ranks <= MOST_RANKS,
            # Above 0, so that a step takes some time.
            "latency": _is_duration(found.get("latency")) and found["latency"] > 0,
            "operation": _is_duration(found.get("operation")),
            "seconds_per_byte": isinstance(rates, dict)
            and set(rates) == set(COLLECTIVES)
            and all(map(_is_duration, rates.values())),
        }
        wrong = next((key for key, good in right.items() if not good), None)
        if wrong:
            raise ValueError(
                f"{path}: network: {wrong} is missing or not valid: write the file anew with "
                f"`hvdcompress check --json {path}`"
            )
        return cls(**{key: found[key] for key in right})

    def crossing(self, kind: str) -> float:
        """Bytes that cross a rank's link, in each direction, for each that it hands in: by
        rings."""
        others, verb = self.ranks - 1, kind.split()[0]
        return {
            "allreduce": 2 * others / self.ranks,
            "allgather": float(others),
            "alltoall": others / self.ranks,
        }[verb]

    def among(self, ranks: int, rings: bool) -> "Network":
        """The same links with another number of ranks.

        Args:
            ranks: how many.
            rings: a collective takes as many messages, one after the other, as there are other
                ranks, like Gloo's; otherwise as many as a tree is high, like MPI's.
        """
        if ranks == self.ranks:
            return self

        def messages(ranks: int) -> int:
            return ranks - 1 if rings else math.ceil(math.log2(ranks))

        waits = max(self.latency - _CYCLE, 0.0) * messages(ranks) / messages(self.ranks)
        return dataclasses.replace(self, ranks=ranks, latency=min(self.latency, _CYCLE) + waits)

    def faster(self, factor: float) -> "Network":
        """The same network with a rate `factor` times as high."""
        return dataclasses.replace(
            self,
            seconds_per_byte={
                kind: seconds / factor for kind, seconds in self.seconds_per_byte.items()
            },
        )


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LONGEST


def added_seconds(load: Load, network: Network, backward: float = 0.0) -> float:
    """Seconds by which the exchange makes a step longer.

    Encoding takes turns with backward on one thread and never hides. The bytes of the last gradient
    cannot hide either.

    Args:
        load: of the compression.
        network: what its collectives take.
        backward: seconds of the backward pass. Payloads that need not wait for it hide behind it.
    """
    transfer = sum(
        nbytes * network.crossing(kind) * network.seconds_per_byte[kind]
        for kind, nbytes in load.exchanged.items()
    )
    messages = load.rounds + sum(math.ceil(nbytes / FUSION) for nbytes in load.exchanged.values())
    operations = sum(load.operations.values())
    exchange = transfer + network.latency * messages + network.operation * operations
    hidden = min(backward, exchange - network.latency - load.last * transfer) if load.hides else 0.0
    return load.encode + exchange - hidden + load.decode


def break_even(
    load: Load, dense: Load, network: Callable[[float], Network], backward: float = 0.0
) -> Optional[float]:
    """The factor by which a network's rate may grow until the dense exchange adds no more.

    Args:
        load: of a compression.
        dense: the load without compression.
        network: network(factor) has links that are `factor` times as fast.
        backward: seconds of the backward pass.

    Returns:
        The factor. It is below 1 if the dense exchange adds no more as it is, None if it always
        adds more, 0 if it never does.
    """

    def pays(factor: float) -> bool:
        return added_seconds(load, network(factor), backward) < added_seconds(
            dense, network(factor), backward
        )

    low, high = 1 / _FASTEST, _FASTEST
    if pays(high):
        return None
    if not pays(low):
        return 0.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high
