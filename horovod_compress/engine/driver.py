"""The common part of drivers of a compression's steps: what they know of a step, switches and
states. How a step's requests are answered is each driver's own."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ..compressors.base import Compressor, Step
from ..kernels import Late
from ..protocol.machine import Machine
from . import checkpoint
from .features import Features
from .record_types import Stats
from .tensor import Tensor
from .tensors import Tensors


class Transaction:
    """The tensors of one step of the optimizer, whose results are used together, or not at all.
    ended: whether it was committed or rolled back; discarded: whether somebody said so."""

    def __init__(self) -> None:
        self.tensors: List[Tensor] = []
        self.ended = self.discarded = False
        self._finite = True
        self._late: List[Late] = []

    def note(self, finite: Sequence[bool]) -> None:
        """Takes of some results whether they are finite, without a wait where that is late."""
        if isinstance(finite, Late):
            self._late.append(finite)
        # Not &=, by which one of several threads could undo what another one has found.
        elif not all(finite):
            self._finite = False

    def fail(self) -> None:
        """Has the results not be used."""
        self._finite = False

    @property
    def settled(self) -> bool:
        """False while `finite` would wait for a device."""
        return not self._late

    def give_up(self) -> None:
        """As `fail`, where what is late does not matter any more."""
        self._finite, self._late = False, []

    @property
    def finite(self) -> bool:
        """True if the results are used: all are finite, and nothing has failed."""
        late, self._late = self._late, []
        try:
            if not all([all(finite) for finite in late]):
                self._finite = False
        except BaseException:
            # What came was not as it must be.
            self.give_up()
            raise
        return self._finite


class Driver(ABC):
    """One rank's side of a compression.

    Args:
        compressor: the configuration in force.
        rank: this rank.
        size: the number of ranks.
        features: beside the algorithm.
        machine: the ranks of this one's machine, where features need them.

    Attributes:
        tensors: what is kept and counted.
        now: what is known of the coming step.
        label: the beginning of names of collectives, of steps that follow.
        latest: the step that a tensor came to last.
        within: says whether a step is under way although no tensor is open.
    """

    label = "hvdc"

    def __init__(
        self,
        compressor: Compressor,
        rank: int,
        size: int,
        features: Features,
        machine: Optional[Machine] = None,
    ) -> None:
        self.tensors, self.features = Tensors(compressor, machine), features
        self.now = Step(0, rank, size, clip_norm=compressor.policy.clip_norm)
        self._steps_ended = self._steps_undone = 0
        self.latest = Transaction()
        # bool() is False.
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

    # -- a step

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
    def under_way(self) -> bool:
        """True where a step has begun that is not finished: users' questions do not touch it."""
        return bool(self.open_tensors()) or self.within()

    @property
    def succeeded(self) -> bool:
        """True if the last step, which is not under way, brought a result that counts."""
        return self.latest.finite

    def fail_last(self) -> List[Tensor]:
        """Has the last step count as one that failed. RuntimeError in the middle of one.

        Returns:
            Its tensors, where it was committed already.
        """
        self._refuse_in_step()
        latest = self.latest
        committed = latest.ended and latest.finite
        latest.discarded = True
        latest.fail()
        self.end_step()
        if not committed:
            return []
        self._steps_undone += bool(latest.tensors)
        return latest.tensors

    def _count_step(self, transaction: Transaction) -> None:
        transaction.ended = True
        self._steps_ended += 1
        self._steps_undone += not transaction.finite

    # -- between steps

    def expect(self, **known: Any) -> None:
        """Says what is known of the coming steps: fields of `Step` by name."""
        self.now = dataclasses.replace(self.now, **known)

    def resize(self, rank: int, size: int) -> None:
        """From the next step on, this is rank `rank` of `size`. What is kept stays."""
        self.end_step()
        self.expect(rank=rank, size=size)
        for tensor in self.tensors:
            tensor.declared = tensor.compressor.collectives(size)

    def switch(
        self,
        compressor: Compressor,
        tensors: Dict[str, Tuple[tuple, Compressor]],
        gains: Dict[str, float],
        factor: Optional[float] = 1.0,
        **links: Any,
    ) -> None:
        """From the next step on, tensors are compressed as another choice says.

        What was kept goes on: in the state, or where that has no place for it, densely in the next
        step that succeeds. A new tensor has kept nothing; what a tensor kept that is left out is
        gone. The last step can no longer be discarded.

        Args:
            compressor: the configuration.
            tensors: {name: (shape, compressor)}, that being `compressor` or a variant.
            gains: by name, what the optimizer's own momentum makes of a result under the new
                choice, over the same under the old one, where that is not 1.
            factor: that of a 1 on each rank, None if it is not known yet, and
                `Handover.check_host` will be told.
            **links: other attributes from then on, as `transport`; and `machine`.

        Raises:
            ValueError: compressors do not suit; nothing is changed then.
        """
        self.arrays()
        new = Tensors(compressor, links.pop("machine", self.tensors.machine))
        for name, (shape, variant) in tensors.items():
            new.add(name, shape, variant, self.now.size)
        for tensor in new:
            if tensor.name in self.tensors:
                gain = gains.get(tensor.name, 1.0)
                earlier = self.tensors[tensor.name]
                self.features.handover.hand_over(earlier, tensor, gain, factor)
        vars(self).update(links, tensors=new)
        self.features.switched()
        self.expect(clip_norm=compressor.policy.clip_norm)
        self.latest = Transaction()

    def arrays(self) -> Dict[str, Dict[str, np.ndarray]]:
        """{name: {array name: array}}: the state itself, not a copy."""
        self.end_step()
        return self.tensors.arrays()

    def _identity(self) -> Dict[str, Any]:
        """The part of a state that must be alike where it is loaded."""
        compressor = self.tensors.compressor
        return {
            "id": compressor.id,
            "rank": self.now.rank,
            "size": self.now.size,
            "seed": compressor.policy.seed,
            **checkpoint.parts.of_tensors(self.tensors),
        }

    def state_dict(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """This rank's state as plain values and copied arrays. into: a
        state_dict of the same driver that is not needed any more; its memory is used again."""
        self.arrays()
        return checkpoint.saved(self._identity(), self.tensors, self.steps_taken(), into)

    def load_state_dict(self, state: Any) -> None:
        """Continues from what `checkpoint.checked` finds for this rank in a state_dict, or in a
        list of all ranks'. ValueError, and nothing changed, where that does not fit."""
        saved = checkpoint.checked(state, self._identity(), self.steps_taken())
        self._continue_from(saved)
        self.features.handover.takes_average = False

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
        return self.tensors.stats(self.totals())

    def totals(self) -> Dict[str, float]:
        """Counts of `stats`: of steps, bytes, elements and seconds; nothing is computed for it."""
        steps = {"steps": self._steps_ended, "steps_undone": self._steps_undone}
        return {**steps, **self.tensors.totals()}
