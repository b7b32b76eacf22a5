"""The choice of a compression on the job itself: training begins with steps of each candidate, and
goes on with the fastest."""

import contextlib
import dataclasses
import logging
import statistics
import time
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence

from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..engine.record_types import Candidate, Plan
from .trial_rule import RULE, Trials, spread

_log = logging.getLogger("horovod_compress")
# Steps between two looks at whether the choice still holds.
_WATCHED = 50
# Times as long as expected: the candidates are tried again.
_CHANGED = 1.3


def default_candidates(*, is_sgd: bool, takes_over: bool) -> List[str]:
    """The candidates where the user names none: dgc, where an SGD has a momentum that it takes
    over, and topk with other SGDs. Neither with other optimizers: Adam cannot see its second moment
    through few gradients."""
    sparse = "dgc" if takes_over else "topk"
    limits = ("", ",min_numel=65536") if is_sgd else ()
    return ["none", "fp16", *(f"{sparse}:ratio=0.01{limit}" for limit in limits)]


@dataclasses.dataclass(frozen=True)
class Auto:
    """The arguments of a trial: see `AutoCompression`."""

    candidates: Optional[Sequence[str]] = None
    probe_steps: int = 30
    margin: float = 0.05


class Controller:
    """Switches a compression from candidate to candidate, as `Trials` says for ranks that agree on
    how long steps take, goes on with the one that is chosen, and tries again where steps become
    slow.

    Args:
        session: the one that is switched.
        candidates: specs. Steps are taken with the last one until the first switch.
        auto: what the user has asked for.
    """

    def __init__(self, session: Any, candidates: List[str], auto: Auto) -> None:
        self._session = weakref.proxy(session)
        # What all ranks must have alike.
        self.arguments = {**dataclasses.asdict(auto), "candidates": candidates}
        # The candidate with which steps are taken.
        self.in_force: str = candidates[-1]
        self._is_first = session.ranks.rank_and_size()[0] == 0
        # When the last step began.
        self._began: Optional[float] = None
        self._try(candidates)

    def _try(self, candidates: Sequence[str]) -> None:
        self.trials = Trials(candidates, self.arguments["probe_steps"], self.arguments["margin"])
        # Seconds of steps since the choice.
        self._seen: List[float] = []

    def plan(self) -> Plan:
        """The result so far: spec (None until there is a choice), ranks, and candidates {spec:
        {"seconds": median of a step, "steps": so many counted}}. JSON-able;
        `Compression.from_spec(plan["spec"])` takes the same choice elsewhere."""
        candidates: Dict[str, Candidate] = {
            spec: {"seconds": its.median if its.seconds else None, "steps": len(its.seconds)}
            for spec, its in self.trials.tried.items()
        }
        ranks = self._session.ranks.rank_and_size()[1]
        return {"spec": self.trials.chosen, "ranks": ranks, "candidates": candidates}

    def follow(self, spec: Optional[str] = None) -> None:
        """Goes on with a candidate; default: the one with which the next step is to be taken."""
        spec = self.trials.current if spec is None else spec
        if spec != self.in_force:
            self._session.switch(spec)
            self.in_force = spec

    def step_begins(self) -> None:
        """Records the last step's time, then switches to the candidate of this one."""
        now = time.perf_counter()
        if self._began is not None:
            self._step_ended(now - self._began)
            self.follow()
        self._began = time.perf_counter()

    def _step_ended(self, seconds: float) -> None:
        if self.trials.chosen is None:
            self.trials.add(max(self._gathered(seconds)))
            if self.trials.chosen and self._is_first:
                _log.warning("auto: %s", self._summary())
        else:
            self._watch(seconds)

    def _gathered(self, value: Any) -> List[Any]:
        return self._session.ranks.gathered("auto", value)

    def resume(self, spec: str, chosen: bool) -> None:
        """Takes over a choice that was made elsewhere, and is in force. Where none was, trials go
        on as they are."""
        self.in_force = spec
        if chosen:
            self._try([spec])

    def state(self) -> Dict[str, Any]:
        """The choice, for a saved state: `resume` takes it as arguments."""
        return {"auto": {"spec": self.in_force, "chosen": self.trials.chosen is not None}}

    @contextlib.contextmanager
    def resuming(self, state: Any) -> Iterator[None]:
        """Takes over the choice that was made when a state was saved, which the body loads. Where
        it does not fit, all stays as it was."""
        first = state[0] if isinstance(state, (list, tuple)) and state else state
        auto, before = first.get("auto") if isinstance(first, dict) else None, self.in_force
        if auto:
            self.follow(auto["spec"])
        try:
            yield
        except ValueError:
            self.follow(before)
            raise
        if auto:
            self.resume(**auto)

    def _watch(self, seconds: float) -> None:
        """Tries the candidates again where steps have become slow."""
        self._seen.append(seconds)
        if len(self._seen) < _WATCHED:
            return
        found = max(self._gathered(statistics.median(self._seen)))
        expected = self.trials.tried[self.trials.current].median
        self._seen.clear()
        tried = list(self.trials.tried)
        if found > _CHANGED * expected and len(tried) > 1:
            if self._is_first:
                _log.warning(
                    "auto: steps take %.1f ms, and took %.1f ms when %s was chosen: trying again",
                    1e3 * found,
                    1e3 * expected,
                    self.trials.current,
                )
            self._try(tried)

    def _summary(self) -> str:
        tried = {spec: its for spec, its in self.trials.tried.items() if its.seconds}
        of_each = "; ".join(
            f"{spec} {1e3 * its.median:.4g} ms in the median of {len(its.seconds)} steps, "
            f"quartiles {1e3 * spread(its.seconds):.3g} apart"
            for spec, its in sorted(tried.items(), key=lambda tried: tried[1].median)
        )
        found = f"goes on with {self.trials.chosen}, by speed only, not by how well it trains"
        return f"{found} ({of_each}). The rule: {RULE}"


def refuse_begun_within_step(compressor: Compressor) -> None:
    """ValueError where an algorithm has to see a forward pass before the first gradient."""
    moments = compressor.policy.moments
    if moments != "minibatch":
        raise ValueError(
            f"moments={moments} cannot begin at a step's first gradient: call "
            f"compression.switch(spec) without at, before the step's forward pass"
        )


def auto_of(spec: Any) -> Optional[Auto]:
    """The trial that a spec asks for: "auto", or {"id": "auto", "candidates": […], …} with the
    fields of `Auto`. None for any other spec.

    Raises:
        ValueError: its fields are wrong, or a candidate cannot begin at a step's first gradient.
    """
    if spec != "auto" and not (isinstance(spec, dict) and spec.get("id") == "auto"):
        return None
    auto = Auto(**{key: spec[key] for key in spec if key != "id"} if spec != "auto" else {})
    candidates = auto.candidates
    if candidates is not None:
        if (
            not isinstance(candidates, (list, tuple))
            or not candidates
            or not all(isinstance(each, str) for each in candidates)
        ):
            raise ValueError(
                f"candidates must be a list of specs as text, such as ['none', 'dgc:ratio=0.01'], "
                f"not {candidates!r}"
            )
        compressors = [get_compressor(each) for each in candidates]
        if any(compressor in compressors[:i] for i, compressor in enumerate(compressors)):
            raise ValueError(f"candidates must be different compressions, not {candidates!r}")
        for compressor in compressors:
            refuse_begun_within_step(compressor)
    # Which says what is wrong with them.
    some = candidates or default_candidates(is_sgd=True, takes_over=True)
    Trials(some, auto.probe_steps, auto.margin)
    return auto
