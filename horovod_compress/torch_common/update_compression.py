"""The exchange of what ranks' optimizers would add to the parameters, between the ranks'
UpdateOptimizers, whoever reduces."""

from typing import Any, Dict, Iterable, List, Tuple

import torch

from ..engine.exchange import Exchange
from ..protocol.handshake import gather
from ..session.bound import Bound
from ..session.choice import Choice
from ..session.port import Port
from ..session.session import Session
from ..session.updates import average, compressor_for_updates, make_alike
from . import shards
from .parameters import places_of
from .steps import bring_means


class UpdateCompression(Bound, Port):
    """The compression of an UpdateOptimizer.

    Args:
        ranks: those that exchange, as of `bring_means`.
        spec: as for `horovod_compress.get_compressor`, or an unbound compression.
        params: the parameters, by name.
        options: what else must be alike on all ranks, JSON-able.
        broadcast: what to do where ranks begin with different parameters.
    """

    def __init__(
        self,
        ranks: Any,
        spec: Any,
        params: Dict[str, torch.Tensor],
        options: Dict[str, Any],
        broadcast: str,
    ) -> None:
        self._ranks, self._params, self._broadcast = ranks, params, broadcast
        described = {
            name: [*param.shape, *shards.place_of(param).values()] for name, param in params.items()
        }
        self._alike = {**options, "shapes": described}
        session = Session(ranks, self, spec)
        Bound.__init__(self, session)
        self._exchange: Exchange = session.exchange

    def choose(self, spec: Any) -> Choice:
        compressor = compressor_for_updates(spec, self._ranks.rank_and_size()[0])
        tensors = {
            name: (shards.shape_of(param), compressor) for name, param in self._params.items()
        }
        alike = {**self._alike, **places_of(self._ranks, self._params.values(), compressor)}
        return Choice(compressor, compressor, tensors, alike)

    def as_saved(self, state: Dict[str, Any]) -> Dict[str, Any]:
        return shards.as_saved(state, self._params, self._session.exchange.tensors)

    def as_here(self, state: Any) -> Any:
        here = self._session.exchange.tensors
        return shards.as_here(state, self._params, here, self._ranks.refused_alone)

    def make(self, choice: Choice) -> Exchange:
        alone, machine = self._ranks.elastic, choice.machine
        return Exchange(choice.compressor, choice.transport, choice.tensors, alone, machine)

    def begin(self, parameters: Dict[str, int], local_steps: int) -> None:
        """Compares what must be alike on all ranks before the first step. parameters: a checksum of
        each that ranks share; local_steps: so many since then."""
        self._ranks.refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer) of this UpdateOptimizer"
        )
        self._session.handshake(
            {"local_steps": local_steps, "parameters": parameters},
            "come to the first step of their UpdateOptimizer",
            "Start all ranks alike, or load on every rank what that rank has saved, and "
            f"{self._broadcast} before the first step",
        )

    def exchange(self, updates: Iterable[Tuple[str, Any, Any]]) -> bool:
        """Replaces each rank's updates by what the compression brings of their mean. updates:
        names, flat float32 arrays, and what those count from: an array is that plus the update, and
        becomes that plus the mean. Returns whether the results are finite on all ranks; where not,
        what was to be sent waits for the next exchange."""
        exchange, ranks = self._exchange, self._ranks
        if not ranks.active:
            for _ in updates:  # which are the mean
                pass
            return True
        self._session.meet()
        carriers = {name: exchange.submit(name, flat, base=base) for name, flat, base in updates}
        bring_means(exchange, ranks, carriers)
        return exchange.succeeded

    def switch(self, spec: Any) -> None:
        """As of `Bound`. Ranks that have not come to their first step compare parameters there."""
        agreed = self._session.agreed
        super().switch(spec)
        self._session.agreed = agreed

    def average(self, tensors: Dict[str, torch.Tensor]) -> None:
        average(self._ranks, tensors, self._mean)

    def make_alike(self, method: str, sums: List[int], tensors: Dict[str, torch.Tensor]) -> None:
        make_alike(self._ranks, method, sums, tensors, self._mean)

    def _mean(self, names: str, tensors: Dict[str, torch.Tensor]) -> None:
        copies = {
            name: tensor.to("cpu", torch.promote_types(tensor.dtype, torch.float32)).contiguous()
            for name, tensor in tensors.items()
        }
        waits = [self._ranks.mean(copy, f"{names}.{name}") for name, copy in copies.items()]
        for wait, (name, copy) in zip(waits, copies.items()):
            wait()
            if copy is not tensors[name]:
                tensors[name].copy_(copy)

    def steps_of_all(self) -> List[int]:
        """How many exchanges each rank has had, with those before it has loaded a state."""
        ranks = self._ranks
        if not ranks.active:
            return [0]
        steps = self._exchange.steps_taken()
        return gather(ranks.transport, f"{ranks.label()}.steps", steps)
