"""Callbacks of Keras: a compression's state in files, one a rank or one for all, next to what
Keras' ModelCheckpoint saves; records of steps; updates that are shared before others look."""

import json
import os
import zipfile
from typing import Any, Dict, Union

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..engine.recording import Destination
from ..session.notices import warn_once
from ..session.unbound import Unbound
from .compression import BoundCompression
from .horovod_internals import compression_given_to
from .optimizer import unwrapped
from .unbound import UnboundCompression


class TellsOfIdling(tf.keras.callbacks.Callback):
    """Warns once where a compression has taken no step in an epoch, and the model's optimizer has
    another one, or none."""

    def __init__(self, compression: Any) -> None:
        super().__init__()
        self._compression, self._steps = compression, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        given = self._compression
        bound = given.the_only() if isinstance(given, Unbound) else given
        before, self._steps = self._steps, sum(bound._session.exchange.steps_taken().values())
        optimizer = unwrapped(getattr(self.model, "optimizer", None))
        its = compression_given_to(optimizer), getattr(optimizer, "compression", None)
        if bound._session.ranks.active and self._steps == before and given not in its:
            warn_once(
                f"{given!r} has compressed nothing in a whole epoch, and the model's "
                "optimizer does not have it. What hvd.load_model(path) makes has none, whatever "
                "was saved: say hvd.load_model(path, compression=compression)"
            )


class StateCheckpoint(TellsOfIdling):
    """Saves a compression's state at the end of each epoch, on every rank, and restores one before
    training.

    A file is replaced as a whole, never half written. model.fit raises ValueError where a file is
    missing, broken or of another model, algorithm, rank or, without `portable`, number of ranks.

    Args:
        compression: the one that Horovod's optimizer got.
        filepath: as for ModelCheckpoint, with {epoch} where each epoch is to have its own; nothing
            else, because losses differ between ranks. The rank, among all and not those of a
            process set, is added: filepath.rank0.npz.
        restore: such a path, without the rank, with whose state training begins.
        portable: there is one file for all ranks, filepath.npz, which any number of ranks can go on
            from, instead of one for each: see `BoundCompression.state_dict`. Where it is to be
            restored, all ranks must find it.
    """

    def __init__(
        self,
        compression: Union[BoundCompression, UnboundCompression],
        filepath: Union[str, os.PathLike],
        restore: Union[str, os.PathLike, None] = None,
        portable: bool = False,
    ) -> None:
        super().__init__(compression)
        self._filepath, self._restore, self._portable = os.fspath(filepath), restore, portable
        try:
            self._filepath.format(epoch=1)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"filepath may hold {{epoch}} and nothing else, not {error}: what else there is "
                f"differs between ranks"
            ) from None

    def on_train_begin(self, logs: Any = None) -> None:
        if self._restore is not None:
            self._compression.load_state_dict(_read(self._file(os.fspath(self._restore))))
            # A second call of fit does not restore again.
            self._restore = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        state = self._compression.state_dict(self._portable)
        if not self._portable or self._compression.is_first:
            _write(self._file(self._filepath.format(epoch=epoch + 1)), state)

    def _file(self, path: str) -> str:
        path = os.path.expanduser(path)
        return f"{path}.npz" if self._portable else f"{path}.rank{hvd.rank()}.npz"


class RecordSteps(TellsOfIdling):
    """compression.record(to, every, by_tensor), for model.fit: tells the recorder when a batch has
    ended.

    Where one execution takes several steps (steps_per_execution), the last one counts.

    Args:
        compression: the one that Horovod's optimizer got.
        to: as of `BoundCompression.record`.
        every: as of `BoundCompression.record`.
        by_tensor: as of `BoundCompression.record`.
    """

    def __init__(
        self,
        compression: BoundCompression,
        to: Destination,
        every: int = 10,
        by_tensor: bool = False,
    ) -> None:
        super().__init__(compression)
        self._options = to, every, by_tensor
        # A Recorder, once training has begun.
        self._recorder: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._recorder = self._recorder or self._compression.record(*self._options)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._recorder.step_ended()


class ShareUpdates(tf.keras.callbacks.Callback):
    """Has ranks exchange what local steps have added since the last exchange of an UpdateOptimizer
    before the model is evaluated, and at the end of each epoch: what is measured and saved are then
    variables that all ranks share. For `every` above 1; before callbacks that save, in their
    list."""

    def _share(self) -> None:
        optimizer = self.model.optimizer
        if not hasattr(optimizer, "take_part"):
            raise ValueError(
                f"ShareUpdates is for models whose optimizer is an hvdc.UpdateOptimizer, and this "
                f"one's is {type(optimizer).__name__}"
            )
        if optimizer.local_steps:  # alike on all ranks
            optimizer.take_part()

    def on_test_begin(self, logs: Any = None) -> None:
        self._share()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._share()


def _write(file: str, state: Dict[str, Any]) -> None:
    flat = [
        (name, key, array)
        for name, named in state["tensors"].items()
        for key, array in named.items()
    ]
    plain = {key: value for key, value in state.items() if key != "tensors"}
    # Some names have no arrays.
    plain.update(arrays=[(name, key) for name, key, _ in flat], names=list(state["tensors"]))
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(f"{file}.part", "wb") as part:
        np.savez(
            part,
            plain=np.array(json.dumps(plain)),
            **{str(i): array for i, (_, _, array) in enumerate(flat)},
        )
    os.replace(f"{file}.part", file)


def _read(file: str) -> Dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as saved:
            state = json.loads(saved["plain"].item())
            state["tensors"] = {name: {} for name in state.pop("names")}
            for i, (name, key) in enumerate(state.pop("arrays")):
                state["tensors"][name][key] = saved[str(i)]
    except (
        OSError,
        EOFError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        zipfile.BadZipFile,
    ) as error:
        raise ValueError(
            f"{file} is no state of a compression that could be restored: {error}"
        ) from None
    return state
