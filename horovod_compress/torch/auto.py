"""A compression that is chosen on the job itself: training begins with steps of each candidate, and goes on with the fastest."""
import functools
import logging
import statistics
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from ..binding import is_elastic
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..handshake import gather
from ..simulate import simulate
from ..trials import Trials
from .compression import BoundCompression, refuse_begun_within_step
from .sgd import can_take_over, is_plain_sgd
from .unbound import UnboundCompression

_log = logging.getLogger("horovod_compress")
_WATCHED = 50  # steps between two looks at whether the choice still holds
_CHANGED = 1.3  # times as long as expected: the candidates are tried again


def default_candidates(optimizer: torch.optim.Optimizer) -> List[str]:
    """What is tried where the user names nothing: specs that are known to end where dense training ends."""
    sparse = "dgc" if can_take_over(optimizer) and not is_plain_sgd(optimizer) else "topk"
    return ["none", "fp16", f"{sparse}:ratio=0.01", f"{sparse}:ratio=0.01,min_numel=65536"]


class ChosenCompression(BoundCompression):
    """What AutoCompression becomes: a compression that is switched from candidate to candidate, until one is chosen."""

    def __init__(self, auto: Dict[str, Any], optimizer: torch.optim.Optimizer, named_parameters: Any, **options: Any) -> None:
        if is_elastic():
            raise ValueError(
                "in an elastic job ranks that join would not know what was chosen: let auto() choose in a job of constant size, and use plan['spec']"
            )
        self._auto = auto
        self._candidates = list(auto["candidates"] or default_candidates(optimizer))
        self._errors: Dict[str, float] = {}
        self._first: Optional[Dict[str, np.ndarray]] = {} if auto["error"] < 1 else None  # gradients of the first step, until errors are known
        self._began: Optional[float] = None  # when the last step did
        self._now = 0.0  # when the step that begins did
        self._try(self._candidates)
        self._in_force = self._trials.current
        super().__init__(self._in_force, optimizer, named_parameters, **options)

    def _try(self, candidates: Sequence[str]) -> None:
        self._trials = Trials(candidates, self._auto["probe_steps"], self._auto["margin"])
        self._seen: List[float] = []  # seconds of steps since the choice

    @property
    def plan(self) -> Dict[str, Any]:
        """What was found: spec (None until there is a choice), ranks, and candidates {spec: {"seconds": median of a step, "steps": so many counted}};
        with an error below 1 also "error" of each. JSON-able; `Compression.from_spec(plan["spec"])` takes the same choice elsewhere."""
        candidates: Dict[str, Dict[str, Any]] = {spec: {"error": error} for spec, error in self._errors.items()}
        for spec, its in self._trials.tried.items():
            candidates.setdefault(spec, {}).update(seconds=its.median if its.seconds else None, steps=len(its.seconds))
        return {"spec": self._trials.chosen, "ranks": self._ranks[1], "candidates": candidates}

    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        if self._first is not None:
            self._first[self._find(tensor).name] = tensor.detach().float().cpu().numpy().copy()
        return super().compress(tensor)

    def _begin_step(self) -> None:
        self._now = time.perf_counter()
        super()._begin_step()
        self._began = time.perf_counter()

    def _switch_where_due(self) -> None:
        super()._switch_where_due()
        if self._began is not None:
            self._choose(self._now - self._began)

    def _choose(self, seconds: float) -> None:
        """Decides with what the step that begins is taken; seconds: that the last one took."""
        if self._first is not None:
            self._leave_out(self._first)
        elif self._trials.chosen is None:
            self._trials.add(max(gather(self._transport, f"{self._label}.auto", seconds)))
            if self._trials.chosen and self._ranks[0] == 0:
                _log.warning("auto: %s", _summary(self.plan))
        else:
            self._watch(seconds)
        self._use(self._trials.current)

    def _use(self, spec: str) -> None:
        if spec != self._in_force:
            self._switch(get_compressor(spec).config)
            self._in_force = spec

    def _leave_out(self, gradients: Dict[str, np.ndarray]) -> None:
        """Leaves out candidates that hold back too much of these gradients."""
        held = [held_back(spec, gradients) for spec in self._candidates]
        means = np.mean(gather(self._transport, f"{self._label}.auto", held), axis=0)
        if not np.isfinite(means).all():
            self._first = {}  # a gradient was not finite: the next step's are looked at
            return
        self._first, self._errors = None, dict(zip(self._candidates, means.tolist()))
        self._try([self._candidates[0], *(spec for spec in self._candidates[1:] if self._errors[spec] <= self._auto["error"])])

    def _watch(self, seconds: float) -> None:
        """Tries the candidates again where steps have become slow."""
        self._seen.append(seconds)
        if len(self._seen) < _WATCHED:
            return
        found, expected = max(gather(self._transport, f"{self._label}.auto", statistics.median(self._seen))), self._expected()
        self._seen.clear()
        tried = list(self._trials.tried)
        if found > _CHANGED * expected and len(tried) > 1:
            if self._ranks[0] == 0:
                message = "auto: steps take %.1f ms, and took %.1f ms when %s was chosen: trying again"
                _log.warning(message, 1e3 * found, 1e3 * expected, self._in_force)
            self._try(tried)

    def _expected(self) -> float:
        return self._trials.tried[self._trials.current].median

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """As of BoundCompression; the choice comes with it."""
        return {**super().state_dict(portable), "auto": {"spec": self._in_force, "chosen": self._trials.chosen is not None}}

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """As of BoundCompression. The choice that was made when the state was saved is taken over."""
        auto = (state if isinstance(state, dict) else state[0]).get("auto") if state else None
        if auto:
            self._use(auto["spec"])
            if auto["chosen"]:
                self._first = None
                self._try([auto["spec"]])
        super().load_state_dict(state)


class AutoCompression(UnboundCompression):
    """A compression for hvd.DistributedOptimizer that chooses among candidates while training begins, as `Trials` says.

    candidates: specs, the dense one first; default: none, fp16, and 1 % by dgc (for an SGD with momentum) or topk, with two limits for small
        tensors. error: candidates are left out that hold back a larger part of the first gradient's squared norm, ‖g − C(g)‖²/‖g‖²; 1 leaves
        out none. probe_steps: at most so many steps are tried. margin: what is less than this part faster than the first candidate is not chosen.
    grad_scaler, discardable: as for BoundCompression.

    Each step that is tried is a step of training, and what a candidate has held back goes on with the next: nothing is lost. How long a step
    takes is seen from gradient to gradient, so all that happens in one counts, and the slowest rank's seconds count. Where steps later take 1.3
    times as long as they did for 50 steps, candidates are tried again. Raises ValueError for bad candidates, and in elastic jobs.
    """

    _bound_class = ChosenCompression

    def __init__(
        self, error: float = 1.0, candidates: Optional[Sequence[str]] = None, probe_steps: int = 30, margin: float = 0.05,
        grad_scaler: Any = None, discardable: bool = False,
    ) -> None:
        super().__init__("none", grad_scaler=grad_scaler, discardable=discardable)
        if not 0 < error <= 1:
            raise ValueError(f"error must be above 0 and at most 1, not {error!r}")
        for spec in candidates or ():
            refuse_begun_within_step(get_compressor(spec).config)
        Trials(candidates or default_candidates(torch.optim.SGD([torch.zeros(1)], 1.0)), probe_steps, margin)  # which says what is wrong with them
        self._auto: Dict[str, Any] = {"error": error, "candidates": candidates, "probe_steps": probe_steps, "margin": margin}

    def __reduce__(self) -> Any:
        kept = {key: self._options[key] for key in ("grad_scaler", "discardable")}
        return functools.partial(type(self), **self._auto, **kept), ()

    def __repr__(self) -> str:
        return "<a compression that is chosen when training begins>"

    @property
    def compressor(self) -> Compressor:
        """Raises ValueError."""
        raise ValueError("auto() tries compressions of gradients: name one for updates, such as topk:ratio=0.01")

    def _made_for(self, optimizer: torch.optim.Optimizer, named_parameters: Any, options: Dict[str, Any]) -> BoundCompression:
        return ChosenCompression(self._auto, optimizer, named_parameters, **options)


def held_back(spec: str, gradients: Dict[str, np.ndarray]) -> float:
    """‖g − C(g)‖²/‖g‖² over all these gradients, of one rank alone, in a first step."""
    compressor: Any = get_compressor(spec)
    if compressor.corrects_momentum:
        compressor = compressor.bound(0.0, False)
    sent = simulate(compressor, [[gradients]]).mean[0]
    norms = [(float(np.square(grad - sent[name]).sum()), float(np.square(grad).sum())) for name, grad in gradients.items()]
    held, whole = map(sum, zip(*norms))
    return held / whole if whole else 0.0


def _summary(plan: Dict[str, Any]) -> str:
    tried = plan["candidates"].items()
    others = ", ".join(f"{spec} {1e3 * its['seconds']:.4g}" for spec, its in tried if spec != plan["spec"] and its.get("seconds"))
    return f"{plan['spec']}, {1e3 * plan['candidates'][plan['spec']]['seconds']:.4g} ms a step" + (f"; ms of the others: {others}" if others else "")
