"""The parameters of an optimizer under their names, and what they hold as float32 on the host."""
import collections
import collections.abc
import inspect
from typing import Any, Iterable, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from ..binding import warn_once

NamedParameters = Iterable[Tuple[str, torch.Tensor]]  # as model.named_parameters() gives


class Slot:
    """A parameter under its name. following: the slot of the parameter that came after it in the last step."""

    def __init__(self, name: str, param: torch.Tensor) -> None:
        self.name, self.param, self.following = name, param, self
        self._staging: Optional[torch.Tensor] = None  # a copy of the gradient, where its own memory is not contiguous float32 on the host

    def load(self, grad: torch.Tensor) -> Tuple[torch.Tensor, np.ndarray]:
        """(tensor, flat array) of float32 on the host: the gradient's own memory where possible."""
        if on_host(grad):
            return grad, grad.numpy().reshape(-1)
        if grad.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise TypeError(f"{self.name}: gradients of {grad.dtype} cannot be compressed; real floating point is needed")
        if self._staging is None:
            if grad.device.type != "cpu":
                warn_once(f"gradients on {grad.device.type} are compressed on the host, through pinned memory")
            self._staging = torch.empty(grad.shape, dtype=torch.float32, device="cpu", pin_memory=grad.device.type == "cuda")
        self._staging.copy_(grad)
        return self._staging, self._staging.numpy().reshape(-1)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor's own memory is a flat float32 array on the host."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def named(optimizer: Optional[torch.optim.Optimizer], named_parameters: Optional[NamedParameters]) -> List[Tuple[str, torch.Tensor]]:
    """(name, parameter) pairs of all parameters to expect, checked."""
    groups = [] if optimizer is None else optimizer.param_groups
    numbered = [(f"group{i}.{j}", p) for i, group in enumerate(groups) for j, p in enumerate(group["params"])]
    found = numbered if named_parameters is None else _listed(named_parameters)
    if not found:
        raise ValueError("no parameters: give the optimizer, named_parameters=model.named_parameters(), or both")
    repeated = sorted(name for name, count in collections.Counter(name for name, _ in found).items() if count > 1)
    if repeated:
        raise ValueError(f"parameter names must be unique; these come twice: {', '.join(repeated)}")
    known = {id(p) for _, p in found}
    if any(id(p) not in known for group in groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that named_parameters does not name")
    return found


def _listed(named_parameters: Any) -> List[Tuple[str, torch.Tensor]]:
    """The pairs of `named_parameters`. TypeError and ValueError for what does not bring (name, parameter) pairs."""
    code = getattr(named_parameters, "gi_code", None)
    if code is nn.Module.named_parameters.__code__ and inspect.getgeneratorstate(named_parameters) == inspect.GEN_CREATED:
        # It is not used up here, but made once more: users give the same generator to hvd.DistributedOptimizer.
        named_parameters = nn.Module.named_parameters(**inspect.getgeneratorlocals(named_parameters))
    if not isinstance(named_parameters, collections.abc.Iterable):
        raise TypeError(
            f"named_parameters must be (name, parameter) pairs, as model.named_parameters() gives, not {named_parameters!r}; an "
            "option goes by its name: ratio=0.01"
        )
    named = list(named_parameters)
    if not named and isinstance(named_parameters, collections.abc.Iterator):
        raise ValueError("named_parameters was used up before: give each call its own model.named_parameters(), or a list")
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError("named_parameters must be (name, parameter) pairs, as model.named_parameters() gives")
    return named


