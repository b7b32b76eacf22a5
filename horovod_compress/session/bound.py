"""The part of a compression that users ask, whoever hands its gradients over."""

from typing import Any, Dict, Sequence, Tuple, Union

from ..engine.record_types import Plan, Stats, TensorStats
from ..engine.recording import Destination, Recorder
from .session import Session

NO_COPIES = (
    "a compression is part of an exchange of ranks, and cannot be copied or pickled: save its "
    "state_dict() on each rank, or one with portable=True, and load it into a compression that is "
    "made anew, from the spec compression.config"
)


class Bound:
    """A compression that users hold: what each of them has, whoever hands its gradients over."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError(NO_COPIES)

    def handshake(self) -> None:
        """Compares the ranks' options, tensors, versions and kernels. All ranks must call it; the
        first gradient calls it otherwise.

        Raises MismatchError, on all ranks alike, which names the first rank that differs and the
        difference.
        """
        self._session.handshake()

    @property
    def config(self) -> Dict[str, Any]:
        """The id and all options, as a JSON-able spec."""
        return self._session.compressor.config

    def stats(self) -> Stats:
        """Totals of this rank since the start: see `Driver.stats`. All 0 where nothing is
        reduced, on one rank."""
        return self._session.exchange.stats()

    def stats_by_tensor(self) -> Dict[str, TensorStats]:
        """Bytes and elements by tensor: see `Tensors.stats_by_name`."""
        return self._session.exchange.tensors.stats_by_name()

    def record(self, to: Destination, every: int = 10, by_tensor: bool = False) -> Recorder:
        """From now on has every so-many-th step written to a file, a callable or a TensorBoard
        writer: see `Recorder`, which is returned. Replaces an earlier one. PyTorch needs
        nothing else. In TensorFlow add the callback `hvdc.RecordSteps`, which is given the same, or
        in loops of one's own call the recorder's `step_ended()` after each step."""
        return self._session.record(to, every, by_tensor)

    @property
    def plan(self) -> Plan:
        """The result of auto() so far: see `Controller.plan`. AttributeError without a trial."""
        if self._session.trial is None:
            raise AttributeError("only a compression that auto() has made has a plan")
        return self._session.trial.plan()

    def discard(self) -> None:
        """Forgets the last step, as if its gradients had never been; to be called on all ranks.
        Needs discardable=True, which a grad_scaler implies. In PyTorch a step that optimizer.step()
        has not used when the next one begins is forgotten without this call."""
        self._session.discard()

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """This rank's residuals and momentum, as the framework's arrays and plain values: one file
        a rank, next to the model's and optimizer's. In PyTorch tensors for torch.save, in
        TensorFlow NumPy arrays by variable, as `StateCheckpoint` saves them.

        portable: all ranks call this at the same step, and get the same: the mean over ranks of
        what each has not sent yet, which any number of ranks can go on from. One file is enough.
        MismatchError where ranks are not at the same step.
        """
        return self._session.state_dict(portable)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Continues from what `state_dict` has returned, of the same model: bit for bit from this
        rank's own, or from a list of all ranks', in any order, or from a portable one. Where that
        list is of another number of ranks, each rank gets their mean, so the mean of what ranks
        have not sent yet is kept. ValueError, with nothing changed, for any other state.

        In PyTorch names may have got or lost the `_orig_mod.` of torch.compile and the `module.` of
        wrappers. In TensorFlow variables that are not known yet get their state when they are,
        where tracing raises what does not fit. A rank that is not in the process set loads nothing.
        """
        self._session.load_state_dict(state)

    def switch(self, spec: Any) -> None:
        """Goes on with another compression, "dgc:ratio=0.01" or {"id": "dgc", "ratio": 0.01},
        from the next step on.

        What ranks have not sent yet goes on: in what the new algorithm keeps, else densely in the
        first step. An SGD's momentum is taken over, or given back, and counts once. In TensorFlow
        functions whose operations change are traced again when they are called next. All ranks call
        it between the same two steps, as in a callback's on_epoch_begin. ValueError for a bad spec,
        RuntimeError in the middle of a step, MismatchError where ranks differ; nothing is changed
        then.
        """
        self._session.switch(spec)
