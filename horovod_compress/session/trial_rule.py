"""The choice of the compression with the shortest steps: by real steps with each, as a pure
function of how long they took."""

import dataclasses
import statistics
from typing import Dict, List, Mapping, Optional, Sequence

# Of a candidate in a row; the first is not counted, because it makes buffers and moves state.
_STEPS = 3
# Times the shortest steps so far, in a first step twice that: after two such in a row a candidate
# is not tried further.
_HOPELESS = 2.0
# Times the shortest steps: those are tried again.
_CLOSE = 1.25
# Of two candidates, from which on their spread can be told.
_TURNS = 4
# The steps of those that count.
_ENOUGH = _TURNS * (_STEPS - 1)
RULE = (
    "another candidate than the first, the dense one, wins if its median step is shorter by more "
    "than the margin and by more than both interquartile ranges together, with eight steps of "
    "each, or if every dense step took over twice its median"
)


def spread(seconds: Sequence[float]) -> float:
    """The interquartile range; 0 of a single step."""
    if len(seconds) < 2:
        return 0.0
    first, _, third = statistics.quantiles(seconds, n=4)
    return third - first


def decide(seconds: Mapping[str, Sequence[float]], margin: float) -> str:
    """The candidate to go on with, by `RULE`: the fastest of those that it lets through, else the
    first.

    seconds: of the steps with each candidate that count, one at least; the dense one comes first.
    margin: a share of the dense one's median.
    """
    (first, dense), *others = seconds.items()

    def is_faster(its: Sequence[float]) -> bool:
        if min(dense) > _HOPELESS * statistics.median(its):
            return True
        gain = statistics.median(dense) - statistics.median(its)
        enough = min(len(dense), len(its)) >= _ENOUGH
        noise = spread(dense) + spread(its)
        return enough and gain > noise and gain > margin * statistics.median(dense)

    faster = [spec for spec, its in others if is_faster(its)]
    return min(faster, key=lambda spec: statistics.median(seconds[spec]), default=first)


@dataclasses.dataclass
class _Tried:
    """seconds: of its counted steps; turns: so many; hopeless: whether it was given up in the
    middle of the last one."""

    seconds: List[float] = dataclasses.field(default_factory=list)
    turns: int = 0
    hopeless: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("inf")


class Trials:
    """Says with which candidate the next step is to be taken, and is told how long it took, until
    one is chosen.

    candidates: specs, the dense baseline first; the last is tried first, so have those last that
        send least: what is much slower than they are is given up after two steps.
    steps: at most so many are tried. margin: as of `decide`, which chooses in the end. All ranks
        that report the same seconds come to the same choice.

    It goes in rounds: each candidate has its turn of a few steps, and then by turns the dense one
    and those that may be faster, as long as there are steps, and no more of them than can have as
    many turns as a decision needs. More turns, not longer ones, because what disturbs a machine
    lasts.
    Raises ValueError where there are too few steps for one turn of each.
    """

    def __init__(self, candidates: Sequence[str], steps: int = 30, margin: float = 0.05) -> None:
        if len(set(candidates)) != len(candidates) or not candidates:
            raise ValueError(
                f"candidates must be one or more different specs, not {list(candidates)}"
            )
        if not isinstance(margin, (int, float)) or not 0 <= margin <= 1:
            raise ValueError(f"margin must be a share from 0 to 1, not {margin!r}")
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise ValueError(f"steps to try must be a whole number, not {steps!r}")
        if steps < _STEPS * len(candidates):
            raise ValueError(
                f"{len(candidates)} candidates take {_STEPS} steps each, at the least: {steps} are "
                f"too few"
            )
        self._baseline, self._margin, self._left = candidates[0], margin, steps
        self.tried: Dict[str, _Tried] = {spec: _Tried() for spec in candidates}
        # Of this round, the one that is under way first.
        self._turns: List[str] = list(reversed(candidates))
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
            its.turns += 1
            self._turns.pop(0)
            self._taken, self._slow = 0, False
            self._turns = self._turns or self._next_round()
            if not self._turns:
                tried = {spec: its.seconds for spec, its in self.tried.items()}
                self.chosen = decide(tried, self._margin)

    def _best(self) -> float:
        return min(its.median for its in self.tried.values())

    def _next_round(self) -> List[str]:
        """Whose turns come next; none where it is time to decide."""
        dense, best, room = self.tried[self._baseline], self._best(), self._left // _STEPS
        limit = min(_CLOSE * best, dense.median)
        others = {s: its for s, its in self.tried.items() if its is not dense and not its.hopeless}
        close = [spec for spec, its in others.items() if min(its.seconds) <= limit]
        close.sort(key=lambda spec: (-others[spec].turns, others[spec].median))
        if dense.hopeless and dense.turns > 1:
            # Which is no accident: it is to be the fastest of the others.
            return close[:room] if min(len(close), room) > 1 else []
        if not dense.hopeless:
            # Those that can still have as many turns as a decision needs.
            close = [spec for spec in close if others[spec].turns + room // 2 >= _TURNS]
        rounds = 1 if dense.hopeless else max(1, _TURNS - dense.turns)
        close = close[: max(0, room // rounds - 1)]
        return [*close, self._baseline] if close else []
