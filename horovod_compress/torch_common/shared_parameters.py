"""The parameters of an UpdateOptimizer, with the values that all ranks share."""

import zlib
from typing import Any, Dict, Optional, Tuple

import torch

from ..session.session import Session
from ..session.updates import Nesterov
from .parameters import NamedParameters, Slot, flat_memory, named
from .shards import is_shard, local


class SharedParameter(Slot):
    """A parameter with the value that all ranks share, and where an outer optimizer has one, its
    momentum. Of a DTensor all are its part on this rank."""

    def __init__(self, name: str, param: torch.Tensor, outer: Optional[Nesterov]) -> None:
        super().__init__(name, param)
        self.shared = torch.empty_like(self.values)
        dtype = torch.promote_types(param.dtype, torch.float32)
        self.momentum = torch.zeros_like(self.values, dtype=dtype) if outer else None
        # The update, until the exchange is over. None where that itself subtracts and adds the
        # shared value.
        self.loaded: Optional[torch.Tensor] = None

    @property
    def values(self) -> torch.Tensor:
        """The parameter's, in its memory. Looked up, because FSDP may give it another one when
        training begins."""
        return local(self.param).detach()

    def swap(self) -> None:
        """Exchanges its values and the shared ones."""
        if is_shard(self.param):
            # FSDP gathers from its memory.
            kept = self.values.clone()
            self.values.copy_(self.shared)
            self.shared.copy_(kept)
        else:
            self.param.data, self.shared = self.shared, self.param.data

    def update(self, session: Session) -> Tuple[str, Any, Any]:
        """The sum of the local steps, as `UpdateCompression.exchange` takes it: in the parameter's
        own memory where possible."""
        on_device = session.exchange.tensors.on_device(self.name)
        values = self.values
        own, base = (flat_memory(tensor, on_device) for tensor in (values, self.shared))
        if self.momentum is None and own is not None and base is not None:
            self.loaded = None
            return self.name, own, base
        values.sub_(self.shared)
        self.loaded, flat = self.load_for(session, values)
        return self.name, flat, None

    def rollback(self) -> None:
        self.values.copy_(self.shared)

    def apply(self, outer: Optional[Nesterov]) -> None:
        """Adds the mean of all ranks' updates, which `update` has become, to the shared value."""
        if self.loaded is None:
            return
        if outer is not None and self.momentum is not None:
            self.momentum = (
                self.momentum.to(self.loaded.device).mul_(outer.momentum).add_(self.loaded)
            )
            self.loaded.add_(self.momentum, alpha=outer.momentum).mul_(outer.lr)
        values = self.values
        if self.loaded.data_ptr() == values.data_ptr():
            values.add_(self.shared)
        else:
            # In the wider of both types, and rounded once.
            values.copy_(self.shared).add_(self.loaded.to(values.device))


def trained(
    optimizer: torch.optim.Optimizer, named_parameters: Optional[NamedParameters]
) -> Dict[str, torch.Tensor]:
    """{name: parameter} of those that this optimizer steps. One that has two names counts once."""
    own = {
        id(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    }
    trained = {
        id(param): (name, param)
        for name, param in named(optimizer, named_parameters)
        if id(param) in own
    }
    places: Dict[Any, str] = {}
    for name, param in trained.values():
        if not param.is_floating_point():
            raise ValueError(
                f"{name}: a parameter of {param.dtype} cannot be compressed; real floating point "
                f"is needed"
            )
        its = local(param)
        if its.is_meta:
            raise ValueError(f"{name} is on the meta device: make UpdateOptimizer after to_empty()")
        if not its.numel() or not its.data_ptr():
            continue
        other = places.setdefault((its.device, its.data_ptr()), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} share memory, so that what one adds would count as the "
                f"other's too: assign the parameter itself, not its data or a Parameter made of "
                "it, and the two are one"
            )
    return dict(trained.values())


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
