"""The common part of drivers of a compression's steps: its tensors, what they keep, and what they
have counted. How a step's requests are answered is each driver's own."""

import contextlib
import dataclasses
import json
import logging
import math
import zlib
from abc import ABC, abstractmethod
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional, Sequence, Tuple, cast

import numpy as np

from .. import kernels
from ..compressors.base import Compressor, Step
from ..compressors.dense import dense_compressor
from ..compressors.model import Model
from ..compressors.state import Role
from ..compressors.wrapper import kin_of
from ..protocol.machine import Machine
from ..protocol.requests import DECLARABLE, FLOAT32
from . import checkpoint
from .dense_policy import compressor_for, go_dense
from .extension import Extension
from .frozen import Frozen
from .group import Group
from .handover import Handover
from .loss_scale import LossScale
from .records import Stats, TensorStats
from .tensor import SENT, SPENT, Tensor
from .wrappers import wrapped

_log = logging.getLogger("horovod_compress")


@dataclasses.dataclass
class Transaction:
    """The tensors of one step of the optimizer, whose results are used together, or not at all.
    ended: whether it was committed or rolled back."""

    finite: bool = True
    ended: bool = False
    tensors: List[Tensor] = dataclasses.field(default_factory=list)


class Driver(ABC):
    """One rank's side of a compression. compressor: the configuration in force; dense_alone: where
    there is one rank only, nothing is held back, because nothing travels; machine: the ranks of
    this one's machine, where features need them. `extensions` are by name, the innermost first."""

    # Which names of collectives begin with: of steps that follow.
    label = "hvdc"

    def __init__(
        self,
        compressor: Compressor,
        rank: int,
        size: int,
        dense_alone: bool = False,
        machine: Optional[Machine] = None,
    ) -> None:
        self.compressor = compressor
        self._dense_alone = dense_alone
        self.machine = machine
        self._tensors: Dict[str, Tensor] = {}
        # A compressor of each kin.
        self._kins: List[Compressor] = []
        self._model = Model()
        self._now = Step(0, rank, size, clip_norm=compressor.policy.clip_norm)
        self._steps_ended = self._steps_undone = 0
        self._dense_was_logged = False
        self.handover = Handover()
        self.extensions: Dict[str, Extension] = {}
        self.extend("loss scale", LossScale())
        self.extend("switch", self.handover)
        self.extend("frozen", Frozen())
        # The one that a tensor came to last.
        self._latest = Transaction()
        # Says whether a step is under way although no tensor is open. bool() is False.
        self.within: Callable[[], bool] = bool

    @abstractmethod
    def end_step(self) -> None:
        """Ends the last step where that has not happened yet. RuntimeError in the middle of one."""

    @abstractmethod
    def rollback(self) -> None:
        """Rolls back what is under way, as if it had not been finite."""

    @abstractmethod
    def _continue_from(self, saved: checkpoint.Saved) -> None:
        """Makes a state that was read this rank's. ValueError, and nothing changed, where it does
        not fit."""

    @abstractmethod
    def open_tensors(self) -> Collection[str]:
        """Names of the tensors that are submitted and not finished."""

    @abstractmethod
    def steps_taken(self) -> Any:
        """The steps taken, as a state says: a number, or one for each tensor."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it a step is under way, also for a handler of signals that asks."""
        before, self.within = self.within, lambda: True
        try:
            yield
        finally:
            self.within = before

    def _refuse_in_step(self) -> None:
        if self.under_way:
            names = "".join(f"{name} … " for name in list(self.open_tensors())[:3])
            raise RuntimeError(
                f"a step is under way, or was given up ({names}not finished): ask between "
                "optimizer.step() and the next backward()"
            )

    @property
    def rank(self) -> int:
        """This rank."""
        return self._now.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._now.size

    @property
    def tensors(self) -> Collection[Tensor]:
        """All that are known."""
        return self._tensors.values()

    def on_device(self, name: str) -> bool:
        """Returns whether a tensor's steps can be where its gradient is, if that is a device; else
        they are on the CPU."""
        tensor = self._tensors.get(name)
        return tensor is not None and tensor.compressor.traits.on_device and tensor.numel < 2**31

    def carries_float64(self, name: str) -> bool:
        """Returns whether gradients of float64 of this tensor may come as such, because they are
        not compressed; else they have to be float32."""
        tensor = self._tensors.get(name)
        clips = self._now.clip_norm is not None
        return tensor is not None and tensor.compressor.traits.carries_float64 and not clips

    @property
    def under_way(self) -> bool:
        """True where a step has begun that is not finished: users' questions do not touch it."""
        return bool(self.open_tensors()) or self.within()

    @property
    def succeeded(self) -> bool:
        """True if the last step, which is not under way, brought a result that counts."""
        return self._latest.finite

    def fail_last(self) -> List[Tensor]:
        """Has the last step count as one that failed. RuntimeError in the middle of one.

        Returns:
            Its tensors, where it was committed already.
        """
        self._refuse_in_step()
        latest = self._latest
        committed, latest.finite = latest.ended and latest.finite, False
        self.end_step()
        if not committed:
            return []
        self._steps_undone += bool(latest.tensors)
        return latest.tensors

    def _count_step(self, transaction: Transaction) -> None:
        transaction.ended = True
        self._steps_ended += 1
        self._steps_undone += not transaction.finite

    def _add(self, name: str, shape: tuple, variant: Compressor) -> Tensor:
        """Makes a tensor known."""
        chosen = wrapped(compressor_for(variant, name, shape), shape, self.machine)
        kins = [kin_of(each) for each in (*self._kins, chosen)]
        kin = kins.index(kins[-1])
        if kin == len(self._kins):
            self._kins.append(chosen)
        elif self._kins[kin] == chosen:
            chosen = self._kins[kin]
        digest = zlib.crc32(json.dumps([repr(chosen), name, shape]).encode())
        state, declared = chosen.init(name, shape), chosen.collectives(self._now.size)
        undeclared = [key for key in state.arrays if not isinstance(chosen.roles.get(key), Role)]
        if undeclared:
            raise ValueError(
                f"{chosen.id} keeps {', '.join(undeclared)}: `roles` must say of each array of the "
                f"state whether it is LOCAL or SHARED"
            )
        if not isinstance(declared, tuple) or not declared or not DECLARABLE.issuperset(declared):
            raise ValueError(
                f"{chosen.id}: `collectives` must return a tuple of some of {sorted(DECLARABLE)}, "
                f"not {declared!r}"
            )
        # Tensors that go dense may do so by the same algorithm.
        dense = dense_compressor(variant.policy.dense, variant.policy.seed or 0)
        if type(chosen) is type(self.compressor) and chosen != dense:
            self._model.add(name, math.prod(shape))
            state.model = self._model
        self._tensors[name] = Tensor(name, chosen, state, kin, digest, math.prod(shape), declared)
        return self._tensors[name]

    def _known(self, name: str, grad: np.ndarray) -> Tensor:
        """The tensor that a gradient is of. ValueError for what cannot be one."""
        if name not in self._tensors:
            raise ValueError(f"{name} is none of the tensors of this compression")
        tensor = self._tensors[name]
        fits = grad.dtype == FLOAT32 or grad.dtype == np.float64 and self.carries_float64(name)
        if not fits or grad.shape != (tensor.numel,):
            raise ValueError(
                f"{name}: expected {tensor.numel} float32 in one dimension, not {grad.shape} of "
                f"{grad.dtype}"
            )
        return tensor

    def _features(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> List[Extension]:
        """The features that the steps of tensors have to do with, the innermost first."""
        return [each for each in self.extensions.values() if each.concerns(tensors, steps)]

    def _apart(self, group: Group, step: Step) -> Collection[str]:
        """The names of a group's tensors that go alone in this step, which are dense in it."""
        if self._dense_alone and step.size == 1:
            return [t.name for t in group.tensors if t.compressor.residual(t.state) is not None]
        dense = self._go_dense(group, step)
        if dense and not self._dense_was_logged:
            self._dense_was_logged = True
            if step.rank == 0:
                _log.warning(
                    "%s: at step %d gathering %s from %d ranks would move more than a dense "
                    "exchange does: it goes dense, and so do other tensors wherever that is so",
                    self.compressor.id,
                    step.index,
                    next(tensor.name for tensor in group.tensors if tensor.name in dense),
                    step.size,
                )
        owing = self.handover.owing(group.tensors)
        return {*dense, *owing} if owing else dense

    def _go_dense(self, group: Group, step: Step) -> Collection[str]:
        return go_dense(group, step)

    def extend(self, name: str, extension: Extension) -> None:
        """Adds a feature around those that are there, or replaces the one of that name."""
        self.extensions[name] = extension

    def expect(self, **known: Any) -> None:
        """Says what is known of the coming steps: fields of `Step` by name."""
        self._now = dataclasses.replace(self._now, **known)

    def resize(self, rank: int, size: int) -> None:
        """From the next step on, this is rank `rank` of `size`. What is kept stays."""
        self.end_step()
        self.expect(rank=rank, size=size)
        for tensor in self._tensors.values():
            tensor.declared = tensor.compressor.collectives(size)

    def switch(
        self,
        compressor: Compressor,
        tensors: Dict[str, Tuple[tuple, Compressor]],
        gains: Dict[str, float],
        factor: Optional[float] = 1.0,
        **links: Any,
    ) -> None:
        """From the next step on, tensors are compressed as {name: (shape, compressor)} says, the
        compressor being `compressor` or a variant. What was kept goes on: in the state, or where
        that has no place for it, densely in the next step that succeeds. gains: by name, new over
        old factor that the reducer applies to a result, where that is not 1; factor: that of a 1 on
        each rank, None if it is not known yet, and `Handover.check_host` will be told; links: other
        attributes from then on, as `machine` and `transport`. A new tensor has kept nothing; what a
        tensor kept that is left out is gone. ValueError, and nothing changed, where compressors do
        not suit. The last step can no longer be discarded."""
        self.arrays()
        before, earlier = dict(vars(self)), self._tensors
        vars(self).update(links, compressor=compressor, _tensors={}, _kins=[], _model=Model())
        try:
            for name, (shape, variant) in tensors.items():
                self._add(name, shape, variant)
        except BaseException:
            vars(self).update(before)
            raise
        for name, tensor in self._tensors.items():
            if name in earlier:
                self.handover.hand_over(earlier[name], tensor, gains.get(name, 1.0), factor)
        self.extend("frozen", Frozen())
        self.expect(clip_norm=compressor.policy.clip_norm)
        self._latest, self._dense_was_logged = Transaction(), False

    @property
    def keeps_state(self) -> bool:
        """True if anything of a gradient is kept for later steps."""
        return any(tensor.state.arrays for tensor in self._tensors.values())

    def arrays(self) -> Dict[str, Dict[str, np.ndarray]]:
        """{name: {array name: array}}: the state itself, not a copy."""
        self.end_step()
        for tensor in self._tensors.values():
            tensor.compressor.apply_pending(tensor.state)
        return {name: tensor.state.arrays for name, tensor in self._tensors.items()}

    def _identity(self) -> Dict[str, Any]:
        """The part of a state that must be alike where it is loaded."""
        return {
            "id": self.compressor.id,
            "rank": self._now.rank,
            "size": self._now.size,
            "seed": self.compressor.policy.seed,
            **checkpoint.parts.of_tensors(self.tensors),
        }

    def state_dict(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """This rank's state as plain values and copied arrays. into: a
        state_dict of the same driver that is not needed any more; its memory is used again."""
        self.arrays()
        return checkpoint.saved(self._identity(), self._tensors.values(), self.steps_taken(), into)

    def load_state_dict(self, state: Any) -> None:
        """Continues from what `checkpoint.checked` finds for this rank in a state_dict, or in a
        list of all ranks'. ValueError, and nothing changed, where that does not fit."""
        saved = checkpoint.checked(state, self._identity(), self.steps_taken())
        self._continue_from(saved)
        self.handover.takes_average = False

    def go_back_to(self, state: Dict[str, Any]) -> None:
        """Continues from a state_dict of this driver, whatever its rank was then. A step that is
        under way is rolled back."""
        self.rollback()
        self._continue_from(checkpoint.read(state))

    def stats(self) -> Stats:
        """Totals of this rank since the start, by name:

        steps; steps_undone: rolled back, or discarded; bytes_sent, bytes_received: by this rank
        through collectives, with carriers, frames, padding, and what ranks compare or save
        together; in TensorFlow by steps alone; dense_bytes: all gradients, in the type in which the
        exchange gets them; ratio: dense_bytes / bytes_sent; elements_sent;
        encode_seconds, exchange_seconds (waiting), decode_seconds; residual_norm: ‖v‖₂ over all
        tensors, now (in the middle of a step, what was just sent may be in it); overflows: how
        often a tensor had finite elements that became infinite in float16.
        """
        if not self.under_way:
            self.arrays()
        residuals = [tensor.residual for tensor in self._tensors.values()]
        squares = sum(
            kernels.of(residual).squared_norm([residual])[0]
            for residual in residuals
            if residual is not None
        )
        counters = self.totals()
        dense, sent = counters["dense_bytes"], counters["bytes_sent"]
        computed = {
            "ratio": dense / sent if sent else 1.0,
            "residual_norm": squares**0.5,
            "overflows": sum(tensor.state.overflows for tensor in self._tensors.values()),
        }
        return cast(Stats, {**counters, **computed})

    def totals(self) -> Dict[str, float]:
        """Counts of `stats`: of steps, bytes, elements and seconds; nothing is computed for it."""
        summed = {
            key: sum(tensor.counters[key] for tensor in self._tensors.values())
            for key in (*SENT, *SPENT)
        }
        return {"steps": self._steps_ended, "steps_undone": self._steps_undone, **summed}

    def stats_by_tensor(self) -> Dict[str, TensorStats]:
        """{name: {"bytes_sent", "dense_bytes", "elements_sent"}} of each tensor: totals since the
        start. bytes_sent has the tensor's frames and carriers, which `stats` adds others to."""
        return {
            name: cast(TensorStats, {key: tensor.counters[key] for key in SENT})
            for name, tensor in self._tensors.items()
        }
