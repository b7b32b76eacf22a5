"""The exchange of what ranks' optimizers would add to the parameters, between the ranks'
UpdateOptimizers."""

from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import horovod.torch as hvd
import numpy as np
import torch

from ..compressors.base import Compressor
from ..exchange import Exchange
from ..handover import OWED
from ..handshake import agree, gather
from ..pytorch.compression import state_of
from ..transport.horovod import synchronize
from ..updates import Averaging, compressor_for_updates
from .binding import TorchBinding


class UpdateCompression(Averaging, TorchBinding):
    """The exchange of an UpdateOptimizer: its compression's config, stats(), stats_by_tensor() and
    record().

    shapes: of the parameters, by name. options: what else must be alike on all ranks, JSON-able.
    """

    def __init__(
        self,
        spec: Any,
        shapes: Dict[str, Tuple[int, ...]],
        options: Dict[str, Any],
        process_set: Any,
    ) -> None:
        super().__init__(process_set)
        self._shapes, self._options = shapes, options
        self._compressor = compressor_for_updates(spec, hvd.rank())
        self._transport = self._transport_of(self._compressor)
        self._host = self._host_for(self._compressor)
        tensors = self._tensors(self._compressor)
        self._exchange = Exchange(
            self._compressor,
            self._transport,
            tensors,
            self._label,
            dense_alone=self._elastic,
            host=self._host,
        )

    def _description(self) -> Dict[str, Any]:
        return {
            **super()._description(),
            **self._options,
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
        }

    def _tensors(self, compressor: Compressor) -> Dict[str, Tuple[Tuple[int, ...], Compressor]]:
        return {name: (shape, compressor) for name, shape in self._shapes.items()}

    def begin(self, parameters: Dict[str, int], local_steps: int) -> None:
        """Compares what must be alike on all ranks before the first step. parameters: a checksum of
        each that ranks share; local_steps: so many since then."""
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer) of this UpdateOptimizer"
        )
        if self._active and not self._agreed:
            advice = (
                "Start all ranks alike, or load on every rank what that rank has saved, and call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
            )
            shared = {"local_steps": local_steps, "parameters": parameters}
            description = {**self._description(), **shared}
            agree(
                self._transport,
                self._label,
                description,
                "come to the first step of their UpdateOptimizer",
                advice,
            )
        self._agreed = True

    def exchange(self, updates: Iterable[Tuple[str, Any, Any]]) -> bool:
        """Replaces each rank's updates by what the compression brings of their mean. updates:
        names, flat float32 arrays, and what those count from: an array is that plus the update, and
        becomes that plus the mean. Returns whether the results are finite on all ranks; where not,
        what was to be sent waits for the next exchange."""
        exchange = self._exchange
        if not self._active:
            for _ in updates:  # which are the mean
                pass
            return True
        # In an elastic job: ranks have left, and those that stay are not asked to synchronize.
        if self._rank_and_size() != self._ranks:
            self._resize()
        self._meet()
        carriers = {name: exchange.submit(name, flat, base=base) for name, flat, base in updates}
        handles = {}
        for name, carrier in carriers.items():
            if exchange.is_payload(name, carrier):
                tensor = (
                    torch.from_numpy(carrier) if isinstance(carrier, np.ndarray) else carrier.tensor
                )
                handles[name] = hvd.allreduce_async_(
                    tensor,
                    name=f"{self._label}.{name}.mean",
                    op=hvd.Average,
                    process_set=self._process_set,
                )
        exchange.flush()
        for name, carrier in carriers.items():
            if name in handles:
                synchronize(handles[name])
            exchange.finish(name, carrier)
        exchange.end_step()
        return exchange.succeeded

    def _average(self, names: str, tensors: Dict[str, torch.Tensor]) -> None:
        copies = {
            name: tensor.to("cpu", torch.promote_types(tensor.dtype, torch.float32)).contiguous()
            for name, tensor in tensors.items()
        }
        handles = [
            hvd.allreduce_async_(
                copy, name=f"{names}.{name}", op=hvd.Average, process_set=self._process_set
            )
            for name, copy in copies.items()
        ]
        for handle, (name, copy) in zip(handles, copies.items()):
            synchronize(handle)
            if copy is not tensors[name]:
                tensors[name].copy_(copy)

    def switch(self, spec: Any) -> None:
        """From the next exchange on, on all ranks, updates are compressed as this spec says; what
        was not sent yet stays, or goes with the next."""
        self._switch(compressor_for_updates(spec, hvd.rank()), compare=self._active)

    def _switch(self, compressor: Compressor, compare: bool = True) -> None:
        self._exchange.end_step()
        host = self._host_for(compressor)
        if compare:
            agree(
                self._transport,
                f"{self._label}.switch",
                compressor.config,
                "called switch()",
                "Call it on all ranks with the same spec",
            )
        self._exchange.transport = self._transport = self._transport_of(compressor)
        self._exchange.host = self._host = host
        self._exchange.switch(compressor, self._tensors(compressor), {})
        self._compressor = compressor

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """What is not sent yet, as tensors and plain values."""
        return state_of(self._exchange, self._transport, self._label, portable and self._active)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Continues from what state_dict has returned on this rank, or from a list of all ranks',
        or from a portable one."""
        self._exchange.load_state_dict(state)

    def rollback(self) -> None:
        """Rolls back an exchange that was interrupted."""
        self._exchange.abandon()

    def steps_of_all(self) -> List[int]:
        """How many exchanges each rank has had, with those before it has loaded a state."""
        if not self._active:
            return [0]
        return gather(self._transport, f"{self._label}.steps", self._exchange.steps_taken())

    # -- for elastic jobs: see `elastic.py`

    def of_all(self, number: int) -> List[int]:
        """The numbers of all ranks, which all call it, also where they do not know each other
        yet."""
        return gather(self._transport, "hvdc.elastic.number", number)

    def _entry(
        self, into: Optional[Dict[str, Any]] = None, owed: Optional[Dict[str, np.ndarray]] = None
    ) -> Dict[str, Any]:
        """owed: by name, what is to be sent beside what this keeps already."""
        kept = super()._entry(into)
        for name, values in (owed or {}).items():
            arrays = kept["tensors"][name]
            arrays[OWED] = arrays.get(OWED, 0) + values
        return kept
