"""The exchange of what ranks' optimizers would add to the parameters, between the ranks'
UpdateOptimizers, whoever reduces."""

from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple, Union

import torch

from ..adapters.updates import Averaging, compressor_for_updates
from ..compressors.base import Compressor
from ..engine.exchange import Exchange
from ..protocol.handshake import agree, gather
from ..transport.base import Transport
from .compression import state_of
from .parameters import tensor_of


class UpdateExchange(Averaging):
    """The exchange of an UpdateOptimizer: its compression's config, stats(), stats_by_tensor() and
    record()."""

    _exchange: Exchange
    _transport: Transport
    # What to do where ranks begin with different parameters.
    _broadcast: str
    # (tensor, name): starts the mean over ranks in the tensor's own memory. Returns a function that
    # waits for it.
    _mean: Callable[..., Callable[[], Any]]

    def __init__(
        self, ranks: Any, spec: Any, shapes: Dict[str, Tuple[int, ...]], options: Dict[str, Any]
    ) -> None:
        """ranks: as the binding takes them. shapes: of the parameters, by name. options: what else
        must be alike on all ranks, JSON-able."""
        super().__init__(ranks)  # type: ignore[call-arg]
        self._shapes, self._options = shapes, options
        self._compressor = compressor_for_updates(spec, self._rank_and_size()[0])
        self._transport = self._transport_of(self._compressor)
        self._machine = self._machine_for(self._compressor)
        self._exchange = Exchange(
            self._compressor,
            self._transport,
            self._tensors(self._compressor),
            dense_alone=self._elastic,
            machine=self._machine,
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
        if self._active:
            agree(
                self._transport,
                self._label(),
                {
                    **self._description(),
                    "local_steps": local_steps,
                    "parameters": parameters,
                },
                "come to the first step of their UpdateOptimizer",
                "Start all ranks alike, or load on every rank what that rank has saved, and "
                f"{self._broadcast} before the first step",
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
        self._meet()
        carriers = {name: exchange.submit(name, flat, base=base) for name, flat, base in updates}
        waits = {
            name: self._mean(tensor_of(carrier), f"{self._label()}.{name}.mean")
            for name, carrier in carriers.items()
            if exchange.is_payload(name, carrier)
        }
        exchange.flush()
        for name, carrier in carriers.items():
            if name in waits:
                waits[name]()
            exchange.finish(name, carrier, now=False)
        return exchange.succeeded

    def _average(self, names: str, tensors: Dict[str, torch.Tensor]) -> None:
        copies = {
            name: tensor.to("cpu", torch.promote_types(tensor.dtype, torch.float32)).contiguous()
            for name, tensor in tensors.items()
        }
        waits = [self._mean(copy, f"{names}.{name}") for name, copy in copies.items()]
        for wait, (name, copy) in zip(waits, copies.items()):
            wait()
            if copy is not tensors[name]:
                tensors[name].copy_(copy)

    def switch(self, spec: Any) -> None:
        """From the next exchange on, on all ranks, updates are compressed as this spec says; what
        was not sent yet stays, or goes with the next."""
        self._switch(compressor_for_updates(spec, self._rank_and_size()[0]), compare=self._active)

    def _switch(self, compressor: Compressor, compare: bool = True) -> None:
        self._exchange.end_step()
        machine = self._machine_for(compressor)
        if compare:
            agree(
                self._transport,
                f"{self._label()}.switch",
                compressor.config,
                "called switch()",
                "Call it on all ranks with the same spec",
            )
        transport, tensors = self._transport_of(compressor), self._tensors(compressor)
        self._exchange.switch(compressor, tensors, {}, machine=machine, transport=transport)
        self._compressor, self._machine, self._transport = compressor, machine, transport

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """The residuals, as tensors and plain values."""
        return state_of(self, portable and self._active)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Continues from what state_dict has returned on this rank, or from a list of all ranks',
        or from a portable one."""
        self._exchange.load_state_dict(state)

    def steps_of_all(self) -> List[int]:
        """How many exchanges each rank has had, with those before it has loaded a state."""
        if not self._active:
            return [0]
        return gather(self._transport, f"{self._label()}.steps", self._exchange.steps_taken())
