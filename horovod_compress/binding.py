"""What the adapters of both frameworks share: the base classes of bound and unbound
compressions."""

import collections
import functools
import itertools
import os
import sys
import warnings
from abc import ABC, abstractmethod
from types import FrameType
from typing import Any, Dict, Iterator, Mapping, Optional, Set, Tuple, Type

from . import checkpoint, kernels, wire
from .checkpoint import Reducing
from .compressors import get_compressor, package_of
from .compressors.base import Compressor
from .compressors.selective import decide_follow_lr
from .driver import Driver
from .handshake import agree, gather
from .machine import Machine
from .recording import Destination, Recorder
from .records import Stats, TensorStats
from .snapshot import discard
from .version import __version__
from .wrappers import machine_for

# Collectives are named by process set and number: the ranks of a set make their compressions on it
# in the same order. Sets are identified by their ranks here, because Horovod reuses the id of a
# removed set; that of all ranks, whose number may change, by none.
_numbers: Dict[Tuple[int, ...], Iterator[int]] = collections.defaultdict(itertools.count)


NO_COPIES = (
    "a compression is part of an exchange of ranks, and cannot be copied or pickled: save its "
    "state_dict() on each rank, or one with portable=True, and load it into a compression that is "
    "made anew, from the spec compression.config"
)
REFUSED_ALONE = (
    "on one rank Horovod reduces nothing, so what ranks have not sent yet cannot be applied: train "
    "on two ranks or more, or in an elastic job "
    "(horovodrun --min-np 1 --host-discovery-script …), where a rank alone applies it"
)


class Binding(ABC):
    """A compression bound to a process set of a framework's Horovod. `hvd` is initialized.
    Construction exchanges nothing: ranks compare their configurations at the first gradient, or in
    `handshake`."""

    def __init__(self, hvd: Any, process_set: Any, hint: str = "") -> None:
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a compression")
        self._process_set = hvd.global_process_set if process_set is None else process_set
        if not isinstance(self._process_set, hvd.ProcessSet):
            raise TypeError(
                f"process_set must be one of Horovod's, not an object of {type(process_set)}; "
                f"{hint}an option goes by its name: ratio=0.01"
            )
        if self._process_set.process_set_id is None:
            raise ValueError(
                "this process set is not registered: pass it to hvd.init() or "
                "hvd.add_process_set() first"
            )
        if is_elastic() and self._process_set.process_set_id != 0:
            raise ValueError(
                "in an elastic job Horovod forgets process sets whenever ranks come or go: leave "
                "process_set out"
            )
        # Which names of collectives begin with.
        self._label = f"hvdc.{self._process_set.process_set_id}"
        self._agreed = False
        # Whether ranks may come and go.
        self._elastic = is_elastic()
        # Whether an elastic state has this compression, where ranks may come and go.
        self._synced = not self._elastic
        # Horovod reduces, and compresses, only where there is more than one rank, or may be.
        self._active = bool(self._process_set.included()) and (
            self._process_set.size() > 1 or self._elastic
        )
        # Since the last `_resize`.
        self._ranks = self._rank_and_size()
        self._hvd = hvd
        self._host: Optional[Machine] = None
        self._has_told_of_float32 = False

    _compressor: Compressor
    # The one that `handshake` and portable states use.
    _transport: Reducing
    _exchange: Driver  # what drives the steps

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError(NO_COPIES)

    def _number(self) -> None:
        """Gives this compression the next number, which is part of its collectives' names. All
        ranks of the process set call it alike."""
        ranks = (
            () if self._process_set.process_set_id == 0 else tuple(self._process_set.ranks or ())
        )
        self._label += f".{next(_numbers[ranks])}"

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

    def _rank_and_size(self) -> Tuple[int, int]:
        """This rank and the number of ranks in the process set; a rank that compresses nothing
        counts as the only one."""
        return (self._process_set.rank(), self._process_set.size()) if self._active else (0, 1)

    def _host_for(self, compressor: Compressor) -> Optional[Machine]:
        """The ranks of this rank's machine, where features around a compressor have use for them.
        ValueError where those cannot have them."""
        if not self._active:
            return None
        machine = machine_for(compressor, self._hvd, self._process_set, is_elastic(), warn_once)
        return machine and (self._host or machine)

    def _meet(self) -> None:
        """Does what features have to arrange for tensors that have come. All ranks call it, before
        a step."""
        if self._host is not None and self._host.due:
            self._host.arrange(self._transport, self._label, self._hvd.cross_rank())

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
            agree(self._transport, self._label, self._description())
            self._agreed = True

    # -- for elastic jobs: see `elastic.py`

    @property
    def _requested(self) -> Compressor:
        """As the spec says, before anything is taken over from an optimizer."""
        return self._compressor

    def _settings(self) -> Dict[str, Any]:
        """What is alike on all ranks, and may have changed since the start: JSON-able."""
        return {"spec": self._requested.config}

    def _adopt(self, settings: Dict[str, Any]) -> None:
        """Goes on with `_settings` of another rank, or of before."""
        compressor = get_compressor(settings["spec"])
        if compressor != self._requested:
            self._exchange.abandon()
            self._switch(compressor, compare=False)

    @abstractmethod
    def _switch(self, spec: Any, compare: bool = True) -> None:
        """Compresses as a spec says from the next step on.

        Args:
            spec: as for `get_compressor`.
            compare: whether all ranks do it, here, and say so to each other. Where they are not
                together yet they go on from rank 0's.

        Raises:
            ValueError: for what cannot be served; nothing is changed then.
            MismatchError: where ranks differ.
        """

    def _entry(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """What this rank keeps; into: as for `Driver.state_dict`."""
        return {**self._exchange.state_dict(into=into), **self._settings()}

    def _go_back_to(self, state: Dict[str, Any]) -> None:
        """Continues from what `_entry` returned, as if nothing had been since."""
        self._adopt(state)
        self._exchange.go_back_to(state)

    def _resize(self) -> None:
        """From the next step on, ranks are those that are there now."""
        self._ranks = self._rank_and_size()
        self._exchange.resize(*self._ranks, self._label)

    def _sync(self) -> None:
        """All ranks, those that stay and those that have just begun, go on from rank 0's step.
        Names of collectives are rank 0's from now on, for what a process has made before does not
        matter."""
        self._adopt(gather(self._transport, "hvdc.elastic.spec", self._settings())[0])
        self._label = gather(self._transport, "hvdc.elastic", self._label)[0]
        self._synced, self._agreed = True, False
        self._exchange.abandon()
        self._resize()
        self.handshake()
        self._go_back_to(checkpoint.synced(self._entry(), self._transport, self._label))

    def _even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """All ranks, of which some are about to leave, go on with the mean of what they keep.
        saved: what this rank kept before; returns the mean of that."""
        self._exchange.abandon()
        self._go_back_to(checkpoint.synced(self._entry(), self._transport, self._label, even=True))
        return checkpoint.synced(saved, self._transport, self._label, even=True)

    def _refuse_unsynced(self, state: str) -> None:
        """RuntimeError where no elastic state has this compression; state: how one gets it."""
        if not self._synced:
            raise RuntimeError(
                f"in an elastic job new ranks get what the others keep from the elastic state: "
                f"give it the compression, as in {state}, and train in "
                "a function under @hvdc.elastic.run, and nowhere before it"
            )

    @property
    def config(self) -> Dict[str, Any]:
        """The id and all options, as a JSON-able spec."""
        return self._compressor.config

    def stats(self) -> Stats:
        """Totals of this rank since the start: see `Driver.stats`. All 0 where Horovod reduces
        nothing, on one rank."""
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
        self._compressor = get_compressor(spec)
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
        if self._is_bound():
            raise TypeError(NO_COPIES)
        return self._made_again()

    def _is_bound(self) -> bool:
        return len(self._bound) > 0

    def _made_again(self) -> Tuple[Any, ...]:
        """What a copy is made by, as `__reduce__` returns it."""
        return functools.partial(type(self), **self._options), (self._compressor,)

    def __repr__(self) -> str:
        return f"<{self._compressor!r}, bound to an optimizer of Horovod's when it is used>"

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
    """Whether ranks may come and go in this job, as horovodrun tells its ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def requested_compressor(spec: Any, optimizer: Any, plain_sgd: bool) -> Any:
    """The compressor of a spec, with `follow_lr` decided. ValueError where it needs the optimizer,
    and that is None."""
    compressor: Any = decide_follow_lr(get_compressor(spec), optimizer is not None, plain_sgd)
    if compressor.traits.corrects_momentum and optimizer is None and compressor.momentum is None:
        raise ValueError(
            f"{compressor.id} needs the optimizer, to take over its momentum; or say momentum=…"
        )
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


def warn_once(message: str, stacklevel: int = 2) -> None:
    """Issues a RuntimeWarning the first time that it is called with this message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"horovod_compress: {message}", RuntimeWarning, stacklevel=stacklevel + 1)


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
