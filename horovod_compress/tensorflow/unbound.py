"""Compressions that find their optimizer by themselves, while the function that gives them
gradients is traced."""

import collections
import itertools
import weakref
from typing import Any, Callable, Dict, Hashable, Optional, Tuple, Type

import tensorflow as tf

from ..session.ranks import is_elastic
from ..session.unbound import NotBoundError, Unbound
from .applied_checks import refuse_unreduced
from .checks import check_options, check_scaler
from .compression import BoundCompression
from .horovod_internals import (
    Reduction,
    compression_given_to,
    is_horovods,
    optimizer_under_construction,
    reduction_of,
    trace_under_way,
)
from .optimizer import before_applying, name_of, optimizers_in_reach, unwrapped

# Of each traced function, the compressions that it has made, and how many of each its present trace
# has.
_made: "weakref.WeakKeyDictionary[Any, Dict[Hashable, Any]]" = weakref.WeakKeyDictionary()
_counts: "weakref.WeakKeyDictionary[Any, collections.Counter]" = weakref.WeakKeyDictionary()
_hashes = itertools.count()
# In place of an optimizer: of a compression that was made for a question, before the first
# gradient, which goes to it.
_EARLY = object()


class UnboundCompression(Unbound):
    """A compression for hvd.DistributedOptimizer, hvd.DistributedGradientTape and
    horovod.tensorflow.keras: compression=….

    It takes momentum, learning rate and process set from the optimizer. With a tape it looks for
    the Keras optimizer that the traced function refers to.

    Args:
        spec: as of `BoundCompression`.
        process_set: need not be given, and must be that of Horovod's optimizer or tape.
        grad_scaler: as of `BoundCompression`.
        discardable: as of `BoundCompression`.

    Raises:
        ValueError: as of `BoundCompression`.
    """

    _bound_class: Type[BoundCompression] = BoundCompression

    def __init__(
        self,
        spec: Any,
        *,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        super().__init__(
            spec, process_set=process_set, grad_scaler=grad_scaler, discardable=discardable
        )
        check_scaler(grad_scaler)
        check_options(self._compressor)
        # By optimizer; None: of tapes, where nothing depends on that. An early one is alone.
        self._bound: Dict[Any, BoundCompression] = {}
        self._given_to: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers of Horovod's

    def __hash__(self) -> int:
        """A new hash for each optimizer: Horovod caches its reduce function by its arguments, and
        two optimizers must not share a trace, in which the second's gradients would be taken for
        the first's."""
        optimizer = optimizer_under_construction()
        if optimizer is None:
            return super().__hash__()
        if is_horovods(optimizer) and optimizer not in self._given_to:
            # Here is the only sight of an optimizer that reduces nothing later.
            self._given_to.add(optimizer)
            before_applying(optimizer, refuse_unreduced)
        return next(_hashes)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> Tuple[Any, Any]:
        """Called by Horovod with a variable's gradient, while a function is traced: Horovod keeps
        its compression where it cannot be replaced."""
        awaiting = (bound for bound in self._bound.values() if bound._graph.awaits(tensor))
        bound = next(awaiting, None) or self._of(reduction_of(tensor))
        compressed, context = bound.compress(tensor)
        return compressed, (bound, context)

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod with what it reduced."""
        bound, context = ctx
        return bound.decompress(tensor, context)

    def _of(self, reduction: Reduction) -> BoundCompression:
        if reduction.optimizer is not None:
            return self.bind(reduction.optimizer, reduction.process_set)
        serving = (
            bound for bound in self._bound.values() if bound._graph.serves(reduction.variables)
        )
        return next(serving, None) or self.bind_in_reach(reduction.process_set)

    def bind(self, optimizer: Any, process_set: Any = None) -> BoundCompression:
        """The compression that serves an optimizer from now on: Horovod's, or one that applies what
        a tape brings."""
        if optimizer not in self._bound:
            if compression_given_to(optimizer) not in (None, self):
                raise ValueError(
                    "this optimizer of Horovod's was given another compression than this one"
                )
            bound = self._bound.get(_EARLY)
            if bound is None:
                bound = self._unserved(process_set)
            elif self._options["process_set"] is None:
                bound.reduced_over(process_set)
            bound._ranks.check_process_set(process_set)
            bound.bind(optimizer)
            self._bound.pop(_EARLY, None)
            self._bound[optimizer] = bound
        return self._bound[optimizer]

    def bind_in_reach(self, process_set: Any = None) -> BoundCompression:
        """The compression that serves the only optimizer which the nearest of the callers has in
        reach; where nothing depends on the optimizer, any. ValueError where it is needed, and there
        are none or several."""
        in_reach = map(unwrapped, optimizers_in_reach()) if self._depends else ()
        found = list({id(optimizer): optimizer for optimizer in in_reach}.values())
        found = [
            optimizer for optimizer in found if compression_given_to(optimizer) is self
        ] or found
        if len(found) == 1:
            return self.bind(found[0], process_set)
        try:
            return self.bind(None, process_set)
        except ValueError as error:
            several = ", ".join(f"{type(each).__name__} {name_of(each)!r}" for each in found)
            seen = f"has several in reach, {several}" if found else "has none in reach"
            raise ValueError(
                f"{error}. The function that these gradients come from {seen}: bind the "
                f"compression to the one that applies them, as in "
                f"hvdc.Compression.{self._compressor.id}(optimizer)"
            ) from None

    @property
    def _depends(self) -> bool:
        """True where another optimizer may change what is exchanged, or applies it."""
        compressor: Any = self._compressor
        return (
            is_elastic()
            or (compressor.traits.corrects_momentum and compressor.momentum is None)
            or compressor.policy.follow_lr is not False
        )

    def the_only(self) -> BoundCompression:
        if len(self._bound) > 1:
            raise NotBoundError(
                "several optimizers have this compression, and each its own of it: ask "
                "hvdc.compression_of(optimizer), or, where tapes bring the "
                "gradients, compression.bind(optimizer)"
            )
        if not self._bound:
            self._bound[_EARLY] = self._unserved()
        return next(iter(self._bound.values()))

    def _unserved(self, process_set: Any = None) -> BoundCompression:
        return self._bound_class(
            self._asked,
            **{**self._options, "process_set": self._options["process_set"] or process_set},
        )


def compression_of(optimizer: Any) -> Optional[BoundCompression]:
    """The compression that an optimizer of Horovod's was given, also inside a LossScaleOptimizer,
    bound to it now where that has not happened yet; None for optimizers without one of this
    package."""
    optimizer = unwrapped(optimizer)
    compression = compression_given_to(optimizer)
    if isinstance(compression, UnboundCompression):
        return compression.bind(optimizer, optimizer.process_set)
    return compression if isinstance(compression, BoundCompression) else None


def one_in_all_traces(key: Hashable, make: Callable[[], Any]) -> Any:
    """The result of make(). In a function that TensorFlow traces it is made in the first trace:
    others get the same one for the same key, and where a trace makes several of that, in their
    order."""
    function, graph = trace_under_way()
    if function is None:
        return make()
    counts = _counts.setdefault(graph, collections.Counter())
    place = key, counts[key]
    counts[key] += 1
    made = _made.setdefault(function, {})
    if place not in made:
        made[place] = make()
    return made[place]
