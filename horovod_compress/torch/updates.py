"""UpdateOptimizer on Horovod."""

import copy
import functools
from typing import Any, Callable, Dict, List, Optional

import horovod.torch as hvd
import numpy as np
import torch

from ..adapters.binding import warn_once
from ..adapters.updates import Nesterov, check_ranks_of_set
from ..compressors.advice import ADAM
from ..deprecated import by_name
from ..engine.handover import DEBT
from ..protocol.handshake import gather
from ..pytorch.adam import AdamWOfRanks
from ..pytorch.parameters import NamedParameters
from ..pytorch.update_compression import UpdateExchange
from ..pytorch.updates import UpdatingOptimizer
from ..transport.horovod import keep, synchronize
from .binding import TorchBinding
from .horovod_internals import let_broadcast_begin

_NOT_NEEDED = (
    "an UpdateOptimizer's state is each rank's own, and hvd.broadcast_optimizer_state gives all "
    "ranks that of one: delete the line hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)

_ONE_STATE = (
    "rank 0 has loaded a state of its UpdateOptimizer, and other ranks have not: all go on from "
    "rank 0's, its optimizer's state too, without what the others had not sent. Load on every rank "
    "what that rank has saved, or a portable state, and delete the line "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)


class AdamW(AdamWOfRanks):
    __doc__ = AdamWOfRanks.__doc__

    _known_as = "hvdc.AdamW"
    _size = staticmethod(hvd.size)


class UpdateCompression(UpdateExchange, TorchBinding):
    """The exchange of an UpdateOptimizer of Horovod's ranks."""

    _broadcast = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)"

    def begin(self, parameters: Dict[str, int], local_steps: int) -> None:
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer) of this UpdateOptimizer"
        )
        super().begin(parameters, local_steps)

    def _mean(self, tensor: torch.Tensor, name: str) -> Callable[[], Any]:
        self._transport.count(tensor.nbytes, tensor.nbytes)
        handle = hvd.allreduce_async_(
            tensor, name=name, op=hvd.Average, process_set=self._process_set
        )
        return functools.partial(synchronize, keep(handle))

    # -- for elastic jobs: see `elastic.py`

    def of_all(self, number: int) -> List[int]:
        """The numbers of all ranks, which all call it, also where they do not know each other
        yet."""
        return gather(self._transport, "hvdc.elastic.number", number)


class UpdateOptimizer(UpdatingOptimizer):
    """Makes an optimizer a compressed one.

    Each rank takes its own step with its own gradients. What the step adds to the parameters is
    compressed with error feedback and exchanged, and all ranks add the mean. So the optimizer's
    momentum, second moments, weight decay and learning rate are inside what is sent, and nothing is
    taken over from it.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = hvdc.UpdateOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression="adacomp:bin_length=64,dense=fp16",
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    It takes the place of hvd.DistributedOptimizer: Horovod reduces no gradients. Parameters are
    bit-identical on all ranks after each exchange; the optimizer's own state is each rank's.

    A copy of the parameters is kept, which an optimizer needs that looks at them. A rank whose
    GradScaler has found infinite gradients skips its own step and takes part with an update of
    zero; each rank's loss scale is its own. Where an update is not finite on some rank, no rank's
    parameters move, and what was to be sent waits for the next exchange, where a residual is kept
    of it; an exchange that fails leaves the shared parameters.

    Args:
        optimizer: any torch optimizer but L-BFGS, with real floating-point parameters. Its
            parameter groups are this one's, so schedulers may have either, and so are its methods:
            call them on either. Where one changes parameters outside of step(), as train() and
            eval() of schedule-free optimizers do, all ranks call it, and parameters become their
            mean over ranks, bit-identical.
        named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered
            by parameter group.
        compression: a spec, as for `horovod_compress.get_compressor`, or
            hvdc.Compression.adacomp(…); default: what is advised for Adam. dgc selects as topk
            does here.
        every: how many local steps come before each exchange (H of DiLoCo, arXiv 2311.08105). In
            between ranks' parameters differ.
        outer: what is done with the mean update; default: it is added. `hvdc.Nesterov()` is
            DiLoCo's.
        process_set: the ranks that exchange; default: all.

    Raises:
        ValueError: bad options.
        MismatchError: at the first step, on all ranks: they were started differently, or begin with
            different parameters.
    """

    compression: UpdateCompression
    _broadcast_in_vain = _NOT_NEEDED

    @by_name
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        named_parameters: Optional[NamedParameters] = None,
        compression: Any = ADAM.spec,
        every: int = 1,
        outer: Optional[Nesterov] = None,
        process_set: Any = None,
    ) -> None:
        for group in optimizer.param_groups if isinstance(optimizer, AdamW) else ():
            check_ranks_of_set(group["ranks"], process_set)
        self._begin_with(
            optimizer,
            named_parameters,
            every,
            outer,
            functools.partial(UpdateCompression, process_set, compression),
        )
        let_broadcast_begin(self)

    # torch declares it once for each kind of closure.
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step of the optimizer on this rank, and after every so many of them the exchange, which
        waits for all ranks."""
        return self._take_step(closure)

    def _exchange(self) -> None:
        # In an elastic job: ranks have left, and those that stay are not asked to synchronize.
        if self.compression._rank_and_size() != self.compression._ranks:
            self.compression._resize()
        super()._exchange()

    def _go_on_from_all(self) -> None:
        """Gives all ranks the state that rank 0 alone has loaded, as scripts for Horovod do that
        resume."""
        steps = self.compression.steps_of_all()
        if len(set(steps)) == 1:
            return
        of_all_ranks = self.compression._process_set.process_set_id == 0
        if not of_all_ranks or any(each not in (0, steps[0]) for each in steps):
            super()._go_on_from_all()
        self._sync()
        if self.compression._exchange.rank == 0:
            warn_once(_ONE_STATE)

    # -- for elastic jobs: see `elastic.py`

    def _entry(self, into: Optional[Dict[str, Any]] = None, begun: bool = False) -> Dict[str, Any]:
        """A round that has begun, on this rank or on another, is kept as one that has not: with
        what local steps have added among what the next exchange is to send."""
        kept = self.compression._entry(into["compression"] if into else None)
        for each in self._parameters if begun or self.local_steps else ():
            arrays = kept["tensors"][each.name]
            arrays[DEBT] = arrays.get(DEBT, 0) + (
                each.load(each.param.detach() - each.shared)[1]
                if self.local_steps
                else np.zeros(each.param.numel(), np.float32)
            )
        return {
            "compression": kept,
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "shared": {
                each.name: (each.shared if self.local_steps else each.param).detach().clone()
                for each in self._parameters
            },
            "momentum": {name: its.clone() for name, its in self._momenta().items()},
        }

    @torch.no_grad()
    def _go_back_to(self, state: Dict[str, Any]) -> None:
        self.compression._go_back_to(state["compression"])
        # Which would go on in the tensors that it is given.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for each in self._parameters:
            each.shared.copy_(state["shared"][each.name])
        for name, momentum in self._momenta().items():
            momentum.copy_(state["momentum"][name])
        self._rollback_round()
        self._shared_is_kept = True

    @torch.no_grad()
    def _sync(self) -> None:
        """All ranks go on from what rank 0 shares. Ranks that stay keep their optimizer's own
        state, and those that have just begun take rank 0's."""
        # What the elastic state itself does with the model brings a rank's own parameters.
        if self.local_steps or self._shared_is_kept:
            self._rollback_round()
        steps = self.compression.of_all(self.compression._exchange.steps_taken())
        self.compression._sync()
        if len(set(steps)) > 1:
            state = hvd.broadcast_object(
                self._optimizer.state_dict(), root_rank=0, name="hvdc.elastic.optimizer"
            )
            if steps[hvd.rank()] != steps[0]:
                self._optimizer.load_state_dict(state)
        shared = [(each.name, each.param) for each in self._parameters]
        momenta = [(f"{name}.momentum", its) for name, its in self._momenta().items()]
        hvd.broadcast_parameters([*shared, *momenta], root_rank=0)

    @torch.no_grad()
    def _even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """As of compressions. A round that has begun ends here."""
        if any(self.compression.of_all(self.local_steps)):
            self._go_back_to(self._entry(begun=True))
        return {**saved, "compression": self.compression._even_out(saved["compression"])}
