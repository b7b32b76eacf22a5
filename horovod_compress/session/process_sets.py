"""Horovod's ranks, in both frameworks: those of a process set, in elastic jobs too."""

import collections
import itertools
import threading
from typing import Any, Dict, Iterator, Optional, Tuple

from ..protocol.handshake import gather, warning_when_stalled
from ..protocol.machine import Placement
from .join_error import error_of_joined
from .ranks import Ranks, is_elastic

# By the ranks of a process set, because Horovod reuses the id of a removed one; those of all ranks,
# whose number may change, by none.
_made: Dict[Tuple[int, ...], Iterator[int]] = collections.defaultdict(itertools.count)
REFUSED_ALONE = (
    "on one rank Horovod reduces nothing, so what ranks have not sent yet cannot be applied: train "
    "on two ranks or more, or in an elastic job "
    "(horovodrun --min-np 1 --host-discovery-script …), where a rank alone applies it"
)


def says_what_is_missing(error: ModuleNotFoundError, framework: str) -> ModuleNotFoundError:
    """The failed import's error; where Horovod is missing, one that says how to install it."""
    if (error.name or "").partition(".")[0] != "horovod":
        return error
    return ModuleNotFoundError(
        f"horovod_compress.{framework} compresses for Horovod, which is not installed: "
        "pip install 'horovod-compress[horovod]', or scripts/setup in a clone. PyTorch's own "
        "DistributedDataParallel needs none: use horovod_compress.ddp",
        name=error.name,
    )


# What horovod.torch and horovod.tensorflow share looks for ranks in the one imported last, until an
# init() has ended.
_EMPTY = (
    "Horovod does not count this rank among all ranks, so its optimizers and tapes reduce nothing: "
    "horovod.torch and horovod.tensorflow were both imported here before hvd.init(). Import one of "
    "them, or call hvd.init() once more, before Horovod's optimizer is made"
)


def _in_a_thread_of_the_user() -> bool:
    """True in a thread that Python has started and that is not the main one. PyTorch calls the
    hooks of gradients on a GPU in threads of its own."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


class ProcessSetRanks:
    """rank and size in a Horovod process set, the one that hvd.DistributedOptimizer has too, as it
    is now; after hvd.shutdown(), when states are still saved, as they were."""

    def __init__(self, process_set: Any) -> None:
        self._process_set = process_set
        self._known: Dict[str, int] = {}

    def error_of_missing(self, count: int, why: str) -> RuntimeError:
        """As of `Transport`."""
        return error_of_joined(count, self.size, [], why)

    @property
    def rank(self) -> int:
        return self._asked("rank")

    @property
    def size(self) -> int:
        return self._asked("size")

    def _asked(self, what: str) -> int:
        try:
            self._known[what] = getattr(self._process_set, what)()
        except ValueError:  # Horovod has been shut down.
            if what not in self._known:
                raise
        return self._known[what]


class HorovodRanks(Ranks):
    """The ranks of a process set of a framework's Horovod, which `hvd` is, initialized."""

    refused_alone = REFUSED_ALONE
    # From which on this process has given none to a compression.
    _unused_numbers = 0
    # By which ranks know this compression; None before its first collective.
    _number: Optional[int] = None
    # Which of the compressions of these ranks this is, in the order in which they are made.
    _place: Optional[int] = None

    def __init__(self, hvd: Any, process_set: Any, hint: str = "") -> None:
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a compression")
        self._hvd = hvd
        self.elastic = is_elastic()
        self.synced = not self.elastic
        self.join(process_set, hint)

    def join(self, process_set: Any, hint: str = "") -> None:
        """Makes these the ranks of a process set, with which nothing was exchanged yet. hint: for
        the error where it is none."""
        hvd = self._hvd
        self.process_set = hvd.global_process_set if process_set is None else process_set
        if not isinstance(self.process_set, hvd.ProcessSet):
            raise TypeError(
                f"process_set must be one of Horovod's, not an object of {type(process_set)}; "
                f"{hint}an option goes by its name: ratio=0.01"
            )
        if self.process_set.process_set_id is None:
            raise ValueError(
                "this process set is not registered: pass it to hvd.init() or "
                "hvd.add_process_set() first"
            )
        of_all = self.process_set.process_set_id == 0
        if of_all and not self.included:
            raise ValueError(_EMPTY)
        if self.elastic and not of_all:
            raise ValueError(
                "in an elastic job Horovod forgets process sets whenever ranks come or go: leave "
                "process_set out"
            )
        # Horovod reduces, and compresses, only where there is more than one rank, or may be.
        super().__init__(self.included and (self.process_set.size() > 1 or self.elastic))
        # TensorFlow's come here again with their first gradients, where another set may be known.
        if not of_all or self._place is None:
            self._place = next(_made[() if of_all else tuple(self.process_set.ranks or ())])
        self.known = self.rank_and_size()

    @property
    def included(self) -> bool:
        """True where this rank is one of them."""
        return bool(self.process_set.included())

    def rank_and_size(self) -> Tuple[int, int]:
        return (self.process_set.rank(), self.process_set.size()) if self.active else (0, 1)

    def label(self) -> str:
        """As of `Ranks`. The first time ranks give this compression a number."""
        if self._number is None and _in_a_thread_of_the_user():
            # Whose collectives come in no order: that of making is left, below the other numbers.
            self._number = -1 - (self._place or 0)
        elif self._number is None:
            self.agree_on_number()
        return f"hvdc.{self.process_set.process_set_id}.{self._number}"

    def agree_on_number(self) -> None:
        """Takes rank 0's number, or where that has none yet, one that none of the ranks has used,
        whatever else they have made or were asked."""
        name = f"hvdc.{self.process_set.process_set_id}.number"
        with warning_when_stalled(
            f"not all {self.transport.size} ranks have come to their first gradient with this "
            f"compression yet (collective {name})"
        ):
            said = gather(self.transport, name, [self._number, HorovodRanks._unused_numbers])
        unused = max(each for _, each in said)
        self._number = unused if said[0][0] is None else said[0][0]
        HorovodRanks._unused_numbers = max(unused, self._number + 1)

    def check_process_set(self, reducing: Any) -> None:
        """ValueError where Horovod reduces gradients over another process set than this
        compression's. reducing: None where that is not known."""
        if reducing is not None and reducing.process_set_id != self.process_set.process_set_id:
            raise ValueError(
                f"this compression is for the process set {self.process_set}, and Horovod reduces "
                f"these gradients over {reducing}: give both the same process_set"
            )

    def placement(self) -> Placement:
        hvd, refused = self._hvd, None
        if self.process_set.process_set_id != 0:
            refused = "needs all ranks of a host: leave process_set out, or hosts"
        elif self.elastic:
            refused = "is not for elastic jobs, where a host's ranks may change: leave it out"
        even = bool(hvd.mpi_ops.is_homogeneous())
        return Placement(
            hvd.rank(), hvd.cross_rank(), hvd.local_rank(), hvd.local_size(), even, refused
        )
