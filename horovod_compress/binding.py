"""What the adapters of both frameworks share: a method for each algorithm, and the base class of
bound compressions."""

import collections
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import warnings
from abc import ABC, abstractmethod
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple, Type

from . import checkpoint, kernels, wire
from .checkpoint import Reducing
from .compressors import find, get_compressor, ids, package_of
from .compressors.base import Compressor
from .compressors.selective import decide_follow_lr
from .driver import Driver
from .handshake import agree, gather
from .hosts import Host
from .recording import Destination, Recorder
from .snapshot import discard
from .version import __version__

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
        self._hvd = hvd
        self._host: Optional[Host] = None
        self._has_told_of_float32 = False

    _compressor: Compressor
    # Horovod reduces, and compresses, only where there is more than one rank.
    _active: bool
    # The one that `handshake` and portable states use.
    _transport: Reducing
    _exchange: Driver  # what drives the steps
    _elastic: bool  # whether ranks may come and go
    # Whether an elastic state has this compression, where ranks may come and go.
    _synced: bool

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

    def _host_for(self, compressor: Compressor) -> Optional[Host]:
        """The ranks of this rank's host, where a compressor has use for them. ValueError where it
        cannot have those."""
        if not getattr(compressor, "hosts", False) or not self._active:
            return None
        if self._process_set.process_set_id != 0:
            raise ValueError(
                "hosts=true needs all ranks of a host: leave process_set out, or hosts"
            )
        if is_elastic():
            raise ValueError(
                "hosts=true is not for elastic jobs, where a host's ranks may change: leave it out"
            )
        if not self._hvd.mpi_ops.is_homogeneous():
            if self._hvd.rank() == 0:
                warn_once(
                    "hosts=true has no effect, because hosts have different numbers of ranks: "
                    "start as many on each"
                )
            return None
        return self._host or Host(self._hvd.local_rank(), self._hvd.local_size())

    def _meet(self) -> None:
        """Has the ranks of a host share memory for the tensors that need it. All ranks call it,
        before a step."""
        if self._host is not None and self._host.waits:
            self._host.meet(self._transport, self._label, self._hvd.cross_rank())

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

    def _kept(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """What this rank keeps; into: as for `Driver.state_dict`."""
        return self._exchange.state_dict(into=into)

    @abstractmethod
    def _go_back_to(self, state: Dict[str, Any]) -> None:
        """Continues from what `_kept` returned, as if nothing had been since."""

    def _resize(self) -> None:
        """From the next step on, ranks are those that are there now."""
        self._exchange.resize(*self._rank_and_size(), self._label)

    def _sync(self) -> None:
        """All ranks, those that stay and those that have just begun, go on from rank 0's step.
        Names of collectives are rank 0's from now on, for what a process has made before does not
        matter."""
        self._label = gather(self._transport, "hvdc.elastic", self._label)[0]
        self._synced, self._agreed = True, False
        self._exchange.abandon()
        self._resize()
        self.handshake()
        self._go_back_to(checkpoint.synced(self._kept(), self._transport, self._label))

    def _even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """All ranks, of which some are about to leave, go on with the mean of what they keep.
        saved: what this rank kept before; returns the mean of that."""
        self._exchange.abandon()
        self._go_back_to(checkpoint.synced(self._kept(), self._transport, self._label, even=True))
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

    def stats(self) -> Dict[str, float]:
        """Totals of this rank since the start: see `Driver.stats`. All 0 where Horovod reduces
        nothing, on one rank."""
        return self._exchange.stats()

    def stats_by_tensor(self) -> Dict[str, Dict[str, int]]:
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
        self._exchange.extensions["recording"] = recorder
        return recorder

    def discard(self) -> None:
        """Forgets the last step, as if its gradients had never been; to be called on all ranks.
        Needs discardable=True."""
        discard(self._exchange)


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
        """The compression that this one has become. RuntimeError where there is none, or there are
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
        if name.startswith("_") or not hasattr(self._bound_class, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.the_only(), name)


def is_elastic() -> bool:
    """Whether ranks may come and go in this job, as horovodrun tells its ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def requested_compressor(spec: Any, optimizer: Any, plain_sgd: bool) -> Any:
    """The compressor of a spec, with `follow_lr` decided. ValueError where it needs the optimizer,
    and that is None."""
    compressor: Any = decide_follow_lr(get_compressor(spec), optimizer is not None, plain_sgd)
    if compressor.corrects_momentum and optimizer is None and compressor.momentum is None:
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


def check_version(horovod: str) -> None:
    """Warns of versions of Horovod other than the one whose internals the adapters were written
    for."""
    if not horovod.startswith("0.28."):
        warn_once(
            f"tested with Horovod 0.28, and this is {horovod}: if gradients are refused, install "
            f"horovod==0.28.1"
        )


def callers(frame: Optional[FrameType] = None) -> Iterator[FrameType]:
    """The frames of the functions that have led here, or to this frame, the nearest first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Algorithms(type):
    """The metaclass of a framework's `Compression`: gives it one method for each algorithm, those
    of other packages included.

    `Compression.dgc(optimizer, ratio=0.01)` is `Compression.from_spec({"id": "dgc", "ratio": 0.01},
    optimizer)`.
    """

    # Of the class: makes the compression of a spec.
    from_spec: Any
    # Of the class: what to write instead of the class alone.
    _example: str

    def __init__(cls, name: str, bases: Tuple[type, ...], members: Dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        for maker in {"from_spec", "auto"} & members.keys():
            getattr(cls, maker).compress = cls.compress

    def compress(cls, tensor: Any) -> None:
        """Horovod gets here where it was given the class, or one of its methods, instead of what
        those return."""
        raise TypeError(f"this is no compression yet: call it, as in compression={cls._example}")

    def __getattr__(cls, id: str) -> Callable[..., Any]:
        try:
            if id.startswith("_"):
                raise ValueError(f"type object {cls.__name__!r} has no attribute {id!r}")
            return _factory(cls, find(id))
        except (ValueError, ImportError) as error:
            raise AttributeError(str(error)) from error

    def __dir__(cls) -> List[str]:
        return sorted({*super().__dir__(), *ids()})


@functools.lru_cache(maxsize=None)
def _factory(compression: Any, algorithm: Type[Compressor]) -> Callable[..., Any]:
    """The function that makes a compression of an algorithm. Its signature lists the options, for
    editors to show."""
    arguments = dict(inspect.signature(compression.from_spec).parameters)
    del arguments["spec"]

    def make(*args: Any, **keywords: Any) -> Any:
        options = {
            name: keywords.pop(name)
            for name in list(keywords)
            if name not in arguments and name != "id"
        }
        return compression.from_spec({"id": algorithm.id, **options}, *args, **keywords)

    fields = dataclasses.fields(algorithm)
    options = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for f in fields
    ]
    vars(make).update(
        compress=compression.compress,
        __signature__=inspect.Signature([*arguments.values(), *options]),
    )
    make.__module__, make.__name__, make.__qualname__ = (
        compression.__module__,
        str(algorithm.id),
        f"{compression.__qualname__}.{algorithm.id}",
    )
    listed = [f"    {f.name}: {f.metadata['doc']}; {f.metadata['kind']}" for f in fields]
    make.__doc__ = "\n".join(
        [
            inspect.cleandoc(algorithm.__doc__ or ""),
            "",
            "Options:",
            *listed,
            "",
            "Other arguments: see BoundCompression.",
        ]
    )
    return make


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
            if compressor.same_kernels
            else {}
        ),
    }
