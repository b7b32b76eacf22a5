"""Which compression makes a training's steps shortest: found out by taking real steps with each, as a pure function of how long they took."""
import dataclasses
import statistics
from typing import Dict, List, Optional, Sequence

_STEPS = 3  # of a candidate in a row; the first is not counted, because it makes buffers and moves state
_HOPELESS = 2.0  # times the shortest steps so far, in a first step twice that: after two such in a row a candidate is not tried further
_CLOSE = 1.25  # times the shortest steps: those are tried again


@dataclasses.dataclass
class _Tried:
    """seconds: of its counted steps; hopeless: whether it was given up in the middle of a turn."""

    seconds: List[float] = dataclasses.field(default_factory=list)
    hopeless: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("inf")


class Trials:
    """Says with which candidate the next step is to be taken, and is told how long it took, until one is chosen.

    candidates: specs, the dense baseline first; the last is tried first, so have those last that send least: what is much slower than they are is
        given up after two steps. steps: at most so many are tried. margin: the baseline is chosen where nothing is faster by so large a part.
    All ranks that report the same seconds come to the same choice.

    It goes in rounds: each candidate has its turn of a few steps, and those that come close to the best have another one, as long as there are
    steps. More turns, not longer ones, because what disturbs a machine lasts. Raises ValueError where there are too few steps for one turn of each.
    """

    def __init__(self, candidates: Sequence[str], steps: int = 30, margin: float = 0.05) -> None:
        if len(set(candidates)) != len(candidates) or not candidates:
            raise ValueError(f"candidates must be one or more different specs, not {list(candidates)}")
        if not isinstance(margin, (int, float)) or not 0 <= margin <= 1:
            raise ValueError(f"margin must be a share from 0 to 1, not {margin!r}")
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise ValueError(f"steps to try must be a whole number, not {steps!r}")
        if steps < _STEPS * len(candidates):
            raise ValueError(f"{len(candidates)} candidates take {_STEPS} steps each, at the least: {steps} are too few")
        self._baseline, self._margin, self._left = candidates[0], margin, steps
        self.tried: Dict[str, _Tried] = {spec: _Tried() for spec in candidates}
        self._turns: List[str] = list(reversed(candidates))  # of this round, the one that is under way first
        self._taken = 0  # steps of this turn
        self._slow = False  # whether the last of them was
        self.chosen: Optional[str] = candidates[0] if len(candidates) == 1 else None

    @property
    def current(self) -> str:
        """The candidate with which the next step is to be taken."""
        return self.chosen or self._turns[0]

    def add(self, seconds: float) -> None:
        """Takes in how long the last step took."""
        its, best = self.tried[self.current], self._best()
        self._taken, self._left = self._taken + 1, self._left - 1
        if self._taken > 1:
            its.seconds.append(seconds)
        slow, before = seconds > _HOPELESS * best * (2 if self._taken == 1 else 1), self._slow
        its.hopeless, self._slow = slow and before, slow
        if its.hopeless or self._taken == _STEPS:
            self._next_turn()

    def _best(self) -> float:
        return min(its.median for its in self.tried.values())

    def _next_turn(self) -> None:
        self._turns.pop(0)
        self._taken, self._slow = 0, False
        if self._turns:
            return
        best = self._best()
        close = [spec for spec, its in self.tried.items() if min(its.seconds) <= _CLOSE * best and not its.hopeless]
        close.sort(key=lambda spec: self.tried[spec].median)
        self._turns = close[: self._left // _STEPS]
        if len(close) < 2 or len(self._turns) < 2:
            self.chosen = self._choice()

    def _choice(self) -> str:
        shortest = min(self.tried, key=lambda spec: self.tried[spec].median)
        baseline = self.tried[self._baseline].median
        return shortest if self.tried[shortest].median <= (1 - self._margin) * baseline else self._baseline
