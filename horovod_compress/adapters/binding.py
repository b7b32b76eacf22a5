"""The base classes of bound and unbound compressions, with Horovod and without."""

import functools
import os
import sys
import warnings
from abc import ABC, abstractmethod
from types import FrameType
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Set, Tuple, Type

from .. import kernels
from ..compressors import get_compressor, package_of
from ..compressors.base import Compressor
from ..compressors.learning_rate import decide_follow_lr
from ..engine.driver import Driver
from ..engine.recording import Destination, Recorder
from ..engine.records import Stats, TensorStats
from ..engine.snapshot import discard
from ..engine.wrappers import machine_for
from ..protocol import wire
from ..protocol.handshake import AnyTransport, agree
from ..protocol.machine import Machine, Placement
from ..version import __version__
from .cautions import cautions

NO_COPIES = (
    "a compression is part of an exchange of ranks, and cannot be copied or pickled: save its "
    "state_dict() on each rank, or one with portable=True, and load it into a compression that is "
    "made anew, from the spec compression.config"
)


class Binding(ABC):
    """A compression bound to what hands its gradients over. Construction exchanges nothing: ranks
    compare their configurations at the first gradient, or in `handshake`."""

    def __init__(self, active: bool) -> None:
        # Whether there is more than one rank, or may be.
        self._active = active
        self._agreed = False
        self._machine: Optional[Machine] = None
        self._has_told_of_float32 = False

    # Whether ranks may come and go.
    _elastic = False
    # Whether an elastic state has this compression, where ranks may come and go.
    _synced = True
    _compressor: Compressor
    # The one that `handshake` and portable states use.
    _transport: AnyTransport
    _exchange: Driver  # what drives the steps
    # The transport that moves a compressor's payloads, but in graphs. ValueError where there is
    # none.
    _transport_of: Callable[[Any], Any]

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError(NO_COPIES)

    # No property, which tools read that list what an object has.
    def _label(self) -> str:
        """Returns what names of collectives begin with. All ranks ask it together."""
        return "hvdc"

    def _tell_of_float32(self, name: str) -> None:
        """Warns, the first time, of a tensor whose float64 numbers are not all there in float32."""
        if not self._has_told_of_float32:
            self._has_told_of_float32 = True
            warnings.warn(
                f"horovod_compress: {name} has float64 numbers that are not 0, and are 0 or "
                "infinite in float32, in which they are compressed. Scale the loss, or use none, "
                "which carries float64 as it is",
                RuntimeWarning,
                stacklevel=2,
            )

    def _description(self) -> Dict[str, Any]:
        """The configuration, which must be the same on all ranks: nested JSON-able values."""
        return description_of(self._compressor)

    def handshake(self) -> None:
        """Compares the ranks' options, tensors, versions and kernels. All ranks must call it; the
        first gradient calls it otherwise.

        Raises MismatchError, on all ranks alike, which names the first rank that differs and the
        difference.
        """
        if self._active and not self._agreed:
            agree(self._transport, self._label(), self._description())
            self._agreed = True

    @abstractmethod
    def _rank_and_size(self) -> Tuple[int, int]:
        """This rank and the number of ranks; a rank that compresses nothing counts as the only
        one."""

    def _machine_for(self, compressor: Compressor) -> Optional[Machine]:
        """The ranks of this rank's machine, where features around a compressor have use for them.
        ValueError where those cannot have them."""
        if not self._active:
            return None
        machine = machine_for(compressor, self._placement(), warn_once)
        return machine and (self._machine or machine)

    @abstractmethod
    def _placement(self) -> Placement:
        """Where the ranks are, of which there are more than one, or may be."""

    def _meet(self) -> None:
        """Does what features have to arrange for tensors that have come. All ranks call it, before
        a step."""
        self._exchange.label = self._label()
        if self._machine is not None and self._machine.due:
            self._machine.arrange(self._transport, self._label(), self._placement().machine)

    @property
    def config(self) -> Dict[str, Any]:
        """The id and all options, as a JSON-able spec."""
        return self._compressor.config

    def stats(self) -> Stats:
        """Totals of this rank since the start: see `Driver.stats`. All 0 where nothing is
        reduced, on one rank."""
        return self._exchange.stats()

    def stats_by_tensor(self) -> Dict[str, TensorStats]:
        """Bytes and elements by tensor: see `Driver.stats_by_tensor`."""
        return self._exchange.stats_by_tensor()

    def record(self, to: Destination, every: int = 10, by_tensor: bool = False) -> Recorder:
        """From now on has every so-many-th step written to a file, a callable or a TensorBoard
        writer: see `Recorder`, which is returned. Replaces an earlier one. In PyTorch that is all.
        In TensorFlow the end of a step has to be told: by the callback `hvdc.RecordSteps`, which is
        given the same, or in loops of one's own by the recorder's `step_ended()` after each
        step."""
        self._exchange.end_step()
        recorder = Recorder(self._exchange, to, every, by_tensor)
        self._exchange.extend("recording", recorder)
        return recorder

    def discard(self) -> None:
        """Forgets the last step, as if its gradients had never been; to be called on all ranks.
        Needs discardable=True."""
        discard(self._exchange)


class NotBoundError(RuntimeError, AttributeError):
    """An unbound compression is asked for something that a single bound one has. hasattr() takes it
    for False."""


class Unbound(ABC):
    """A compression for an optimizer that is not known yet: it is bound to Horovod's when the first
    gradient comes from that, or when it is first asked for something. Two optimizers that are given
    the same one get a compression each. It needs no hvd.init(), and can be copied and pickled until
    it is bound. Raises ValueError for bad options at once, as a bound one does; all else is that
    one's: stats(), state_dict(), ….

    options: keyword arguments for `_bound_class`.
    """

    _bound_class: Type[Binding]
    # The compressions that it has become.
    _bound: Any

    def __init__(self, spec: Any, **options: Any) -> None:
        # The first argument of `_bound_class`.
        self._asked: Any = get_compressor(spec)
        self._compressor: Compressor = self._asked
        self._options = options

    @property
    def compressor(self) -> Compressor:
        """That of the spec."""
        return self._compressor

    @abstractmethod
    def the_only(self) -> Binding:
        """The compression that this one has become. NotBoundError where there is none, or there are
        several."""

    def __reduce__(self) -> Tuple[Any, ...]:
        if len(self._bound):
            raise TypeError(NO_COPIES)
        return self._made_again()

    def _made_again(self) -> Tuple[Any, ...]:
        """A callable that makes a copy, and its arguments, as `__reduce__` returns them."""
        return functools.partial(type(self), **self._options), (self._asked,)

    def __repr__(self) -> str:
        return f"<{self._compressor!r}, bound to an optimizer when it is used>"

    def __getattr__(self, name: str) -> Any:
        known = None if name.startswith("_") else getattr(self._bound_class, name, None)
        if known is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not callable(known):
            return getattr(self.the_only(), name)

        # A method can be asked for before there is an optimizer, as hasattr() does, and needs one
        # only when it is called.
        @functools.wraps(known)
        def method(*arguments: Any, **named: Any) -> Any:
            return getattr(self.the_only(), name)(*arguments, **named)

        return method


def is_elastic() -> bool:
    """Returns whether ranks may come and go in this job, as horovodrun tells its ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def requested_compressor(spec: Any, optimizer: Any, plain_sgd: bool) -> Any:
    """The compressor of a spec, with `follow_lr` decided. ValueError where it needs the optimizer,
    and that is None."""
    compressor: Any = decide_follow_lr(get_compressor(spec), optimizer is not None, plain_sgd)
    if compressor.traits.corrects_momentum and optimizer is None and compressor.momentum is None:
        raise ValueError(
            f"{compressor.id} needs the optimizer, to take over its momentum; or say momentum=…"
        )
    for caution in cautions(compressor, optimizer):
        warn_once(caution)
    return compressor


def momentum_of(compressor: Any, sgd: Mapping[str, Any]) -> Tuple[float, bool]:
    """(momentum, nesterov) to take over: the compressor's options, or where those are open an
    SGD's."""
    momentum = sgd["momentum"] if compressor.momentum is None else compressor.momentum
    nesterov = sgd["nesterov"] if compressor.nesterov is None else compressor.nesterov
    return float(momentum), bool(nesterov and momentum)


# Steps between two looks at what an SGD's own momentum still holds, where it was taken over.
LOOK = 64
# Of the largest element that it ever held: what is less is far below what rounding takes from a
# parameter.
DECAYED = 2.0**-30


_warned: Set[str] = set()


def warn_once(message: str) -> None:
    """Issues a RuntimeWarning the first time that it is called with this message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"horovod_compress: {message}", RuntimeWarning, stacklevel=3)


def callers(frame: Optional[FrameType] = None) -> Iterator[FrameType]:
    """The frames of the functions that have led here, or to this frame, the nearest first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def owners(*methods: str) -> Iterator[Any]:
    """The objects whose methods have led here, the nearest first; methods: only of these names."""
    for frame in callers():
        if not methods or frame.f_code.co_name in methods:
            yield frame.f_locals.get("self")


def description_of(compressor: Compressor) -> Dict[str, Any]:
    """The part of a configuration that does not depend on the framework: nested JSON-able values,
    the same on all ranks."""
    package = package_of(str(compressor.id))
    return {
        "version of horovod-compress": __version__,
        "wire version": wire.VERSION,
        "options": compressor.config,
        **({f"package of {compressor.id}": package} if package else {}),
        **(
            {f"kernels, on which {compressor.id}'s last bits depend": kernels.backend}
            if compressor.traits.same_kernels
            else {}
        ),
    }
