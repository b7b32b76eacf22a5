"""The base class of compressions on Horovod, in both frameworks: process sets, and elastic jobs."""

import collections
import itertools
import threading
from abc import abstractmethod
from typing import Any, Dict, Iterator, Optional, Tuple

from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..engine import checkpoint
from ..protocol.handshake import gather, warning_when_stalled
from ..protocol.machine import Placement
from .binding import Binding, is_elastic

# By the ranks of a process set, because Horovod reuses the id of a removed one; those of all ranks,
# whose number may change, by none.
_made: Dict[Tuple[int, ...], Iterator[int]] = collections.defaultdict(itertools.count)
REFUSED_ALONE = (
    "on one rank Horovod reduces nothing, so what ranks have not sent yet cannot be applied: train "
    "on two ranks or more, or in an elastic job "
    "(horovodrun --min-np 1 --host-discovery-script …), where a rank alone applies it"
)


def says_what_is_missing(error: ModuleNotFoundError, framework: str) -> ModuleNotFoundError:
    """The error of an import that has failed; where Horovod is missing, one that says so."""
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


class HorovodBinding(Binding):
    """A compression bound to a process set of a framework's Horovod. `hvd` is initialized."""

    # From which on this process has given none to a compression.
    _unused_numbers = 0
    # By which ranks know this compression; None before its first collective.
    _number: Optional[int] = None

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
        if self._process_set.process_set_id == 0 and not self._process_set.included():
            raise ValueError(_EMPTY)
        if is_elastic() and self._process_set.process_set_id != 0:
            raise ValueError(
                "in an elastic job Horovod forgets process sets whenever ranks come or go: leave "
                "process_set out"
            )
        self._elastic = is_elastic()
        self._synced = not self._elastic
        self._hvd = hvd
        # Horovod reduces, and compresses, only where there is more than one rank, or may be.
        active = bool(self._process_set.included()) and (
            self._process_set.size() > 1 or self._elastic
        )
        super().__init__(active)
        of_all = self._process_set.process_set_id == 0
        # Which of the compressions of these ranks this is, in the order in which they are made.
        # TensorFlow's come here again with their first gradients, where another set may be known.
        if not of_all or "_place" not in vars(self):
            self._place = next(_made[() if of_all else tuple(self._process_set.ranks or ())])
        # Since the last `_resize`.
        self._ranks = self._rank_and_size()

    def _label(self) -> str:
        """As of `Binding`. The first time ranks give this compression a number."""
        if self._number is None and _in_a_thread_of_the_user():
            # Whose collectives come in no order: that of making is left, below the other numbers.
            self._number = -1 - self._place
        elif self._number is None:
            self._agree_on_number()
        return f"hvdc.{self._process_set.process_set_id}.{self._number}"

    def _agree_on_number(self) -> None:
        """Takes rank 0's number, or where that has none yet, one that none of the ranks has used,
        whatever else they have made or were asked."""
        name = f"hvdc.{self._process_set.process_set_id}.number"
        with warning_when_stalled(
            f"not all {self._transport.size} ranks have come to their first gradient with this "
            f"compression yet (collective {name})"
        ):
            said = gather(self._transport, name, [self._number, HorovodBinding._unused_numbers])
        unused = max(each for _, each in said)
        self._number = unused if said[0][0] is None else said[0][0]
        HorovodBinding._unused_numbers = max(unused, self._number + 1)

    def check_process_set(self, reducing: Any) -> None:
        """ValueError where Horovod reduces gradients over another process set than this
        compression's. reducing: None where that is not known."""
        if reducing is not None and reducing.process_set_id != self._process_set.process_set_id:
            raise ValueError(
                f"this compression is for the process set {self._process_set}, and Horovod reduces "
                f"these gradients over {reducing}: give both the same process_set"
            )

    def _rank_and_size(self) -> Tuple[int, int]:
        """This rank and the number of ranks in the process set; a rank that compresses nothing
        counts as the only one."""
        return (self._process_set.rank(), self._process_set.size()) if self._active else (0, 1)

    def _placement(self) -> Placement:
        hvd, refused = self._hvd, None
        if self._process_set.process_set_id != 0:
            refused = "needs all ranks of a host: leave process_set out, or hosts"
        elif self._elastic:
            refused = "is not for elastic jobs, where a host's ranks may change: leave it out"
        even = bool(hvd.mpi_ops.is_homogeneous())
        return Placement(
            hvd.rank(), hvd.cross_rank(), hvd.local_rank(), hvd.local_size(), even, refused
        )

    # -- for elastic jobs: see `elastic.py`

    @property
    def _requested(self) -> Compressor:
        """As the spec says, before anything is taken over from an optimizer."""
        return self._compressor

    def _settings(self) -> Dict[str, Any]:
        """The settings that are alike on all ranks, and may have changed since the start:
        JSON-able."""
        return {"spec": self._requested.config}

    def _adopt(self, settings: Dict[str, Any]) -> None:
        """Goes on with `_settings` of another rank, or of before."""
        compressor = get_compressor(settings["spec"])
        if compressor != self._requested:
            self._exchange.rollback()
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
        """The state that this rank keeps; into: as for `Driver.state_dict`."""
        return {**self._exchange.state_dict(into=into), **self._settings()}

    def _go_back_to(self, state: Dict[str, Any]) -> None:
        """Continues from what `_entry` returned, as if nothing had been since."""
        self._adopt(state)
        self._exchange.go_back_to(state)

    def _resize(self) -> None:
        """From the next step on, ranks are those that are there now."""
        self._ranks = self._rank_and_size()
        self._exchange.resize(*self._ranks)

    def _sync(self) -> None:
        """All ranks, those that stay and those that have just begun, go on from rank 0's step,
        under its names of collectives, which traced functions hold."""
        # First, because ranks that have just begun name collectives where they switch.
        self._agree_on_number()
        self._adopt(gather(self._transport, "hvdc.elastic.spec", self._settings())[0])
        self._synced, self._agreed = True, False
        self._exchange.rollback()
        self._resize()
        self.handshake()
        self._go_back_to(checkpoint.synced(self._entry(), self._transport, self._label()))

    def _even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """All ranks, of which some are about to leave, go on with the mean of what they keep.
        saved: what this rank kept before; returns the mean of that."""
        self._exchange.rollback()
        self._go_back_to(
            checkpoint.synced(self._entry(), self._transport, self._label(), even=True)
        )
        return checkpoint.synced(saved, self._transport, self._label(), even=True)

    def _refuse_unsynced(self, state: str) -> None:
        """RuntimeError where no elastic state has this compression; state: how one gets it."""
        if not self._synced:
            raise RuntimeError(
                f"in an elastic job new ranks get what the others keep from the elastic state: "
                f"give it the compression, as in {state}, and train in "
                "a function under @hvdc.elastic.run, and nowhere before it"
            )
