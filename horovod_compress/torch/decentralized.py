"""DecentralizedOptimizer: ranks with models of their own, which exchange with their neighbors."""

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set

import numpy as np
import torch

from ..decentralized.gossip import DEFAULT, Gossip, compressor_of_messages
from ..decentralized.rules import Copies, zeta_of
from ..decentralized.topology import Topology
from ..protocol.handshake import agree, gather
from ..session.choice import description_of
from ..session.notices import warn_once
from ..session.ranks import is_elastic
from ..session.unbound import Unbound
from ..session.updates import check_ranks_of_set, check_rounds
from ..torch_common.optimizer_around import OptimizerAround, check_inner, check_one_state
from ..torch_common.parameters import NamedParameters, Slot, checksum, trained
from .horovod_internals import let_broadcast_begin
from .transport import TorchRanks
from .updates import AdamW

_SAVED, _OTHERS = "those of the saved states", "others than those of the saved states"
_ECD = (
    "ecd sends extrapolated parameters, and what messages lose grows with the steps: on a ring of "
    "8 ranks it trained at 8 bits, and not at 4, where dcd and choco did. Take those; see "
    "docs/decentralized.md"
)
_FLOAT64 = (
    "DecentralizedOptimizer exchanges in float32: parameters of float64 come back from an exchange "
    "as such, and steps that are smaller than float32 shows are lost"
)
_ALPHA = (
    "messages of rank {} were further from what they stand for than nothing at all would be, "
    'stats()["alpha"] of the last 100 steps is above 1: training may diverge. Take more bits, or '
    "choco"
)
_FAILED = (
    "an exchange has failed, and ranks may hold different copies of each other. After a WireError, "
    "which all ranks raise in one exchange, call resync() on all; after another error end the job, "
    "and start again from the states that ranks have saved"
)
_NOT_FINITE = (
    "rank {}'s optimizer holds numbers that are not finite, and so will be its updates: its model "
    "follows its neighbors only. Load the last saved states on all ranks, and take no step where "
    "loss or gradients are not finite"
)


class DecentralizedOptimizer(OptimizerAround):
    """Makes an optimizer one of a rank that has a model of its own, and exchanges compressed
    messages with its neighbors only.

        optimizer = hvdc.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            model.named_parameters(), compression="qsgd:bits=4,norm=max", topology="ring",
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        …
        with optimizer.mean_parameters(model.buffers()):
            evaluate(model)

    It takes the place of hvd.DistributedOptimizer: Horovod reduces no gradients. Momentum, second
    moments and a GradScaler's scale are each rank's own, and so are buffers, such as the statistics
    of batch normalization: nobody exchanges them.

    Args:
        optimizer: any torch optimizer but L-BFGS and those that exchange already, as
            UpdateOptimizer, with real floating-point parameters.
        named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered by
            parameter group.
        compression: of messages, a spec or hvdc.Compression.qsgd(…); default:
            qsgd:bits=4,norm=max. One whose payloads a rank can decode alone; it has no error
            feedback here, because the neighbors' copies are what is fed back.
        topology: "ring", "torus", "complete", or a matrix of weights, symmetric, whose rows sum to
            1: zeros are between ranks that do not exchange.
        algorithm: "dcd", for compressors without bias; "choco", for any; "ecd", as published; or
            "exact", which sends all parameters as they are.
        step: choco's ζ, above 0, at most 1; default: 0.5. The more messages lose the smaller.
        every: how many local steps come before each exchange.
        process_set: the ranks that exchange; default: all.

    Raises:
        TypeError: `optimizer` is no optimizer of torch.
        ValueError: bad options, or an optimizer or a compression that cannot serve here.
        MismatchError: at the first step, on all ranks: they were started differently, or begin with
            different parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Optional[NamedParameters] = None,
        compression: Any = None,
        topology: Any = "ring",
        algorithm: str = "dcd",
        step: Optional[float] = None,
        every: int = 1,
        process_set: Any = None,
    ) -> None:
        check_inner(optimizer, "DecentralizedOptimizer")
        check_rounds(every, None)
        for group in optimizer.param_groups if isinstance(optimizer, AdamW) else ():
            check_ranks_of_set(group["ranks"], process_set)
        zeta = zeta_of(algorithm, step)
        if algorithm == "exact" and compression not in (None, "none"):
            raise ValueError("exact sends parameters as they are: leave compression out")
        spec = compression or ("none" if algorithm == "exact" else DEFAULT)
        compressor = compressor_of_messages(spec.compressor if isinstance(spec, Unbound) else spec)
        if is_elastic():
            raise ValueError(
                "DecentralizedOptimizer does not serve elastic jobs, where ranks come and go: use "
                "UpdateOptimizer, or save portable states and start again"
            )
        self._ranks = TorchRanks(process_set)
        self._transport = self._ranks.transport = self._ranks.transport_of(compressor)
        graph = Topology(topology, self._transport.size)
        self._slots = [
            Slot(name, param) for name, param in trained(optimizer, named_parameters).items()
        ]
        shapes = {slot.name: tuple(slot.param.shape) for slot in self._slots}
        self._gossip = Gossip(compressor, algorithm, zeta, graph, self._transport, shapes)
        # What must be alike on all ranks.
        self._told = {
            **description_of(compressor),
            "algorithm": algorithm,
            "step": zeta,
            "every": every,
            "topology": graph.description(),
            "shapes": {name: list(shape) for name, shape in shapes.items()},
        }
        # Checksums of the parameters that belong to the loaded state.
        self._sums: List[int] = []
        self._agreed = self._failed = False
        # Ids of the tensors that `mean_parameters` shows.
        self._shown: Set[int] = set()
        if algorithm == "ecd":
            warn_once(_ECD)
        if any(slot.param.dtype == torch.float64 for slot in self._slots):
            warn_once(_FLOAT64)
        self._surround(optimizer, every, [slot.param for slot in self._slots])
        let_broadcast_begin(self)

    def __repr__(self) -> str:
        topology, algorithm = self._gossip.topology.name, self._gossip.algorithm
        return f"DecentralizedOptimizer({self._optimizer!r}, {algorithm} on a {topology})"

    # torch declares it once for each kind of closure.
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step of the optimizer on this rank, and after every so many of them the exchange with
        its neighbors."""
        return self._take_step(closure)

    @contextlib.contextmanager
    def mean_parameters(self, buffers: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Within it the model has the mean of all ranks' parameters, for evaluation and for saving;
        after it, this rank's own again. All ranks enter it: it sends parameters densely.

        Args:
            buffers: tensors that are averaged too, where they are floating-point, as
                model.buffers().
        """
        its = [slot.param for slot in self._slots]
        its += [buffer for buffer in buffers if buffer.is_floating_point()]
        # Within another of these, those that it does not show already.
        tensors = [tensor for tensor in its if id(tensor) not in self._shown]
        own = [tensor.detach().clone() for tensor in tensors]
        shown_before, self._shown = self._shown, self._shown | set(map(id, tensors))
        try:
            with torch.no_grad():
                for i, tensor in enumerate(tensors):
                    tensor.copy_(self._mean(i, tensor))
            yield
        finally:
            self._shown = shown_before
            with torch.no_grad():
                for tensor, values in zip(tensors, own):
                    tensor.copy_(values)

    def consensus(self) -> List[float]:
        """How far each rank's model is from the mean of all: ‖x − mean‖/‖mean‖, in rank order. All
        ranks call it; it sends parameters densely."""
        apart = size = 0.0
        for i, slot in enumerate(self._slots):
            mean = self._mean(i, slot.param)
            apart += float((slot.param.detach().cpu() - mean).square().sum())
            size += float(mean.square().sum())
        name = f"{self._ranks.label()}.consensus"
        return gather(self._transport, name, (apart / (size or 1.0)) ** 0.5)

    def resync(self) -> None:
        """Makes what ranks hold of each other anew. All ranks call it, after a WireError, which all
        of them raise in one exchange. Neighbors send each other their public copies densely."""
        if self._gossip.copies:
            self._gossip.resync()
        self._failed = False

    def stats(self) -> Dict[str, Any]:
        """Totals of this rank since the start: see `Gossip.stats`."""
        return self._gossip.stats()

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """The optimizer's state_dict, and under "decentralized" what this rank and its neighbors
        hold of each other: one file a rank, with the model's parameters of this rank. portable: all
        ranks call this after an exchange; it has the mean of their parameters, and serves any
        number of ranks, with the moments of the rank that has saved it."""
        if self._shown and not portable or self.local_steps and portable:
            raise RuntimeError(
                "a rank's state is saved with its own parameters, outside of `with "
                "optimizer.mean_parameters():`, and a portable one after an exchange"
            )
        gossip = self._gossip
        if (self._failed or gossip.failure) and not portable:
            raise RuntimeError(_FAILED)
        kept: Dict[str, Any] = {
            **gossip.identity(portable),
            "exchanges": gossip.steps,
            "local_steps": self.local_steps,
            "sums": [] if portable else self._checksums(),
            "tensors": {
                name: {key: torch.from_numpy(a.copy()) for key, a in copies.arrays().items()}
                for name, copies in ({} if portable else gossip.copies).items()
            },
        }
        if portable:
            for i, slot in enumerate(self._slots):
                wide = torch.promote_types(slot.param.dtype, torch.float32)
                kept["tensors"][slot.name] = {"parameter": self._mean(i, slot.param).to(wide)}
        return {**self._optimizer.state_dict(), "decentralized": kept}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continues from what state_dict has returned on this rank, or from a portable one, which
        brings the parameters too, or from the optimizer's own. ValueError, with nothing changed,
        for what does not fit."""
        if self._shown:
            raise RuntimeError(
                "load states before or after `with optimizer.mean_parameters():`, not within it"
            )
        check_one_state(state_dict, "DecentralizedOptimizer")
        kept = state_dict.get("decentralized")
        if kept is not None:
            self._gossip.check(kept)
        self._optimizer.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "decentralized"}
        )
        gossip, self._agreed, self._failed = self._gossip, False, False
        gossip.copies, gossip.failure, self.local_steps, self._sums = {}, None, 0, []
        if kept is None:
            return
        gossip.steps = kept["exchanges"]
        if kept["rank"] is None:
            with torch.no_grad():
                for slot in self._slots:
                    slot.param.copy_(kept["tensors"][slot.name]["parameter"])
            return
        self.local_steps, self._sums = kept["local_steps"], list(kept["sums"])
        for name, arrays in kept["tensors"].items():
            copied = {key: np.array(tensor, np.float64) for key, tensor in arrays.items()}
            gossip.copies[name] = Copies(gossip.algorithm, copied)

    def _checksums(self) -> List[int]:
        return [checksum(slot.param.detach()) for slot in self._slots]

    def _mean(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over ranks, float64 on the CPU. i: its number, alike on all ranks."""
        wide = tensor.detach().to("cpu", torch.float64, copy=True).contiguous()
        name = f"{self._ranks.label()}.mean.{i}"
        summed = self._transport.allreduce(name, wide.numpy().reshape(-1))()
        return torch.from_numpy(summed).view(tensor.shape).div_(self._transport.size)

    def _begin(self) -> None:
        if self._shown:
            raise RuntimeError(
                "within `with optimizer.mean_parameters():` the model has not this rank's "
                "parameters: take the step after it"
            )
        if self._failed:
            raise RuntimeError(_FAILED)
        self._refuse_unknown()
        if self._agreed:
            return
        self._gossip.label = self._ranks.label()
        sums, loaded = self._checksums(), bool(self._gossip.copies)
        parameters: Any = (_SAVED if sums == self._sums else _OTHERS) if loaded else sums
        agree(
            self._transport,
            self._ranks.label(),
            {
                **self._told,
                "exchanges": self._gossip.steps,
                "local_steps": self.local_steps,
                "parameters": parameters,
            },
            "come to the first step of their DecentralizedOptimizer",
            "Start all ranks alike, and call hvd.broadcast_parameters(model.state_dict(), "
            "root_rank=0) before the first step; or load on every rank what that rank has saved, "
            "model and optimizer, or on all the same portable state",
        )
        if parameters is _OTHERS:
            raise RuntimeError(
                "the parameters are not those that this state was saved with: load what this rank "
                "has saved of its model too"
            )
        if not loaded:
            self._gossip.begin({slot.name: slot.load(slot.param.data)[1] for slot in self._slots})
        self._agreed = True

    def _exchange(self) -> None:
        gossip, undone = self._gossip, self._gossip.counts["steps_undone"]
        loaded = {slot: slot.load(slot.param.data) for slot in self._slots}
        values = {slot.name: flat for slot, (_, flat) in loaded.items()}
        self._failed = True
        gossip.start(values)
        gossip.finish(values)
        self._failed, self.local_steps = False, 0
        for slot, (tensor, _) in loaded.items():
            if tensor.data_ptr() != slot.param.data_ptr():
                slot.param.copy_(tensor)
        if gossip.loses_too_much:
            warn_once(_ALPHA.format(self._transport.rank))
        if gossip.counts["steps_undone"] > undone and any(
            torch.is_tensor(value) and not torch.isfinite(value).all()
            for kept in self.state.values()
            for value in kept.values()
        ):
            warn_once(_NOT_FINITE.format(self._transport.rank))
