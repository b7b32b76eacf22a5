"""Checks of what optimizers apply against what compressions have seen: errors where these differ,
and replicas would part, or one optimizer's momentum would be given to another's variables."""

import threading
import weakref
from typing import Any, Callable, Dict, Iterable, List, Sequence, Set, Tuple

import numpy as np
import tensorflow as tf

from ..session.notices import warn_once
from ..session.ranks import is_elastic
from .horovod_internals import (
    compression_given_to,
    has_reduced,
    is_horovods,
    is_keras3,
    kept_local,
    reduced_by_horovod,
)
from .variables import checksum

# Those of all compressions of this process, which threads may make while others trace.
_graphs: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.Lock()


def may_see_gradients(graph: Any) -> None:
    """Makes a compression's `Graph` known, which is asked from now on whether it serves
    variables."""
    with _lock:
        _graphs.add(graph)


def _seen(variables: Sequence[Any]) -> bool:
    """Returns whether a gradient of one of these has come to a compression, or to the tape of
    one."""
    with _lock:
        return any(
            graph.serves(variables) or any(variable.ref() in graph.local for variable in variables)
            for graph in _graphs
        )


def refuse_unreduced(
    optimizer: Any, grads_and_vars: Iterable[Tuple[Any, Any]]
) -> List[Tuple[Any, Any]]:
    """The gradients and variables that an optimizer with a compression is about to apply.

    Horovod reduces gradients in `minimize` and in Keras' own training step; in 0.28 it does not
    where they are applied.

    Args:
        optimizer: a user's that a compression is bound to, or Horovod's.
        grads_and_vars: as `apply_gradients` gets them.

    Returns:
        The same, as a list.

    Raises:
        ValueError: where no compression has seen a gradient of these variables, ever, and nobody
            else has made their mean over ranks.
    """
    pairs = list(grads_and_vars)
    local = kept_local(optimizer)
    # Sparse gradients go Horovod's own way.
    dense = [
        (grad, variable)
        for grad, variable in pairs
        if isinstance(grad, tf.Tensor) and variable.ref() not in local
    ]
    variables = [variable for _, variable in dense]
    if (
        _seen(variables)
        or _may_be_unseen(optimizer)
        or any(reduced_by_horovod(grad) for grad, _ in dense)
        # Zeros have an optimizer make its variables.
        or all(_is_zero(grad) for grad, _ in dense)
    ):
        return pairs
    seen = (
        f"{type(optimizer).__name__} was given gradients of {variables[0].name} and others that no "
        "compression has seen: they are this rank's own, and ranks' variables would part. "
    )
    if is_keras3(optimizer):
        raise ValueError(
            f"{seen}Keras 3 never has hvd.DistributedOptimizer reduce any. Let "
            "hvdc.UpdateOptimizer(optimizer, compression) take its place; or in a train_step of "
            "your own take tape = hvd.DistributedGradientTape(tape, compression=compression), and "
            "its gradient(loss, [v.value for v in model.trainable_variables]); or have Keras 2, by "
            "TF_USE_LEGACY_KERAS=1 in the environment and pip install tf_keras"
        )
    raise ValueError(
        f"{seen}hvd.DistributedOptimizer reduces gradients in minimize() and in Keras' own "
        "training step, and not in apply_gradients(). In a train_step of your own wrap the tape: "
        "tape = hvd.DistributedGradientTape(tape, compression=compression). Or leave tapes as they "
        "are, and let hvdc.UpdateOptimizer(optimizer, compression) take the place of "
        "hvd.DistributedOptimizer"
    )


def _is_zero(grad: Any) -> bool:
    """Returns whether a gradient is known to be zero."""
    value = tf.get_static_value(grad)
    return grad.op.type == "ZerosLike" if value is None else not np.any(value)


def _may_be_unseen(optimizer: Any) -> bool:
    """Returns whether an optimizer may well apply gradients that no compression has seen: Horovod's
    that has reduced some, has another compression, or is on one rank; a user's whose updates are
    exchanged; in elastic jobs a user's, which may take a step before ranks meet, to have its
    variables made."""
    if not is_horovods(optimizer):
        return is_elastic() or hasattr(optimizer, "take_part")
    ranks = optimizer.process_set
    alone = not is_elastic() and (not ranks.included() or ranks.size() == 1)
    return alone or has_reduced(optimizer) or not hasattr(compression_given_to(optimizer), "bind")


class Applied:
    """The variables that the bound optimizer was seen to apply gradients to, next to all whose
    gradients depend on it."""

    def __init__(self) -> None:
        self._references: Set[Any] = set()
        # By reference, of others: a checksum, and whether a call has found another one.
        self._others: Dict[Any, Tuple[int, bool]] = {}

    def add(self, variables: Iterable[Any]) -> None:
        self._references.update(variable.ref() for variable in variables)

    def check(self, variables: List[Any], sees_steps: bool) -> None:
        """A call begins with gradients of these: ValueError where one has changed since its call
        before, and not by the optimizer. Those that the optimizer applies leave the list.
        sees_steps: whether all its steps are seen."""
        variables[:] = [each for each in variables if each.ref() not in self._references]
        for variable in variables:
            now = checksum(variable)
            before, changed = self._others.get(variable.ref(), (now, False))
            self._others[variable.ref()] = now, changed or now != before
            # Before the optimizer's first step one change may be that of weights that are loaded,
            # or moved on trial.
            if now != before and (self._references or sees_steps and changed):
                raise ValueError(
                    f"{variable.name} has changed, and not by the optimizer that this compression "
                    "is bound to, whose momentum or learning rate its gradients have. Where "
                    "several optimizers apply what one tape brings, give each a compression and a "
                    "tape of its own, as in hvd.DistributedGradientTape(tape, "
                    "compression=hvdc.Compression.dgc(optimizer)), around one "
                    "tf.GradientTape(persistent=True); or make the compression with momentum=0"
                )


class Repetitions:
    """Warns once where a variable's gradients come again before the optimizer has applied those
    that came last, which have a momentum that is taken over."""

    def __init__(self) -> None:
        # By name: the call of a variable's last gradients, and the optimizer's steps at that time.
        self._last: Dict[str, Tuple[int, int]] = {}
        # Whether the optimizer was ever seen to take one: it may be another that applies.
        self._takes_steps = False

    def check(
        self, names: Iterable[str], call: int, steps: int, counts: Callable[[str, int], bool]
    ) -> None:
        """A call begins with gradients of these, after so many steps of the optimizer. counts: says
        of a variable whether what an earlier call brought was to be applied."""
        for name in names:
            before, then = self._last.get(name, (call, steps))
            self._last[name] = call, steps
            self._takes_steps = self._takes_steps or then != steps
            if before != call and then == steps and self._takes_steps and counts(name, before):
                warn_once(
                    f"gradients of {name} came twice while the optimizer has taken no step. Both "
                    "times they got the momentum that was taken over from it, which counts twice "
                    "where they are added up: call gradient() once, for the sum of the losses, let "
                    "hvd.DistributedOptimizer(backward_passes_per_step=…) add them up, or make the "
                    "compression with momentum=0. Where results are not applied, make it with "
                    "discardable=True, and say discard(). Where another optimizer applies them by "
                    "now, give that a compression and a tape of its own"
                )


class Served:
    """The steps of a compression, noted with a variable that it serves. Warns once where a third
    one comes in a row, each for a single step: compressions that are made anew keep nothing."""

    _NOTE = "_hvdc_served"

    def __init__(self, variable: tf.Variable) -> None:
        self._steps = 0
        before = getattr(variable, self._NOTE, None)
        # Those that came before this one, in a row, and took a single step.
        self._brief = before._brief + 1 if before is not None and before._steps == 1 else 0
        setattr(variable, self._NOTE, self)
        if self._brief == 2:
            warn_once(
                f"the gradients of {variable.name} come to another compression in each step, which "
                "keeps nothing for the next one: what is not sent is lost. Make the compression "
                "once, before the loop, and give it to each tape"
            )

    def step_begins(self) -> None:
        self._steps += 1
