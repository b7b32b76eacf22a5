"""What an UpdateOptimizer keeps: saved and loaded."""

from typing import Any, Dict, List, Optional, Tuple

import torch

from ..adapters.updates import Nesterov
from ..engine import checkpoint
from .around import OptimizerAround
from .shared import SharedParameter
from .state_names import rekeyed, renaming
from .update_compression import UpdateExchange


class KeepsUpdates(OptimizerAround):
    """What an UpdateOptimizer keeps, beside its steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        compression: UpdateExchange,
        parameters: List[SharedParameter],
        every: int,
        outer: Optional[Nesterov],
    ) -> None:
        self._optimizer, self.compression, self._parameters = optimizer, compression, parameters
        self._every, self._outer = every, outer
        # Since the last exchange.
        self.local_steps = 0
        # Whether this is within `shared_parameters`.
        self._shows_shared = False
        # Whether, in an elastic job, parameters are to be the shared values which that went back
        # to.
        self._shared_is_kept = False

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """The optimizer's state_dict and, under "updates", what is not sent yet, the outer
        momentum, and between exchanges the shared parameters: one file a rank. Within
        `shared_parameters` it forgets the local steps since the last exchange, as the model does.
        portable: all ranks call this after an exchange; "updates" is then the same for all, and
        serves any number of ranks."""
        local_steps = 0 if self._shows_shared else self.local_steps
        if portable and local_steps:
            raise RuntimeError(
                f"{local_steps} of {self._every} local steps are taken: ask for a portable state "
                f"after an exchange"
            )
        kept: Dict[str, Any] = {
            "compression": self.compression.state_dict(portable),
            "local_steps": local_steps,
        }
        kept["shared"] = (
            {each.name: each.shared.clone() for each in self._parameters} if local_steps else {}
        )
        kept["momentum"] = {
            each.name: each.momentum.clone()
            for each in self._parameters
            if each.momentum is not None
        }
        return {**self._optimizer.state_dict(), "updates": kept}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continues from what state_dict has returned, or from the optimizer's own. ValueError,
        with nothing changed, for what does not fit."""
        if self._shows_shared:
            raise RuntimeError(
                "load states before or after `with optimizer.shared_parameters():`, not within it"
            )
        kept: Any = state_dict.get("updates")
        if kept is not None:
            try:
                kept = self._renamed(kept)
                self._check(kept)
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"not a state_dict of an UpdateOptimizer: {error!r}") from None
            self._check_groups(state_dict["param_groups"])
            self.compression.load_state_dict(kept["compression"])
        self._optimizer.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "updates"}
        )
        self.local_steps = kept["local_steps"] if kept is not None else 0
        for each in self._parameters if kept is not None else ():
            if self.local_steps:
                each.shared.copy_(kept["shared"][each.name])
            if each.momentum is not None:
                each.momentum.copy_(kept["momentum"][each.name])

    def _renamed(self, kept: Dict[str, Any]) -> Dict[str, Any]:
        """What a state has under "updates", by the names that parameters have here."""
        found = renaming(kept["compression"], [each.name for each in self._parameters])
        return rekeyed({**kept, "compression": rekeyed(kept["compression"], found)}, found)

    def _check(self, kept: Dict[str, Any]) -> None:
        checkpoint.refuse(checkpoint.wrong_count("local_steps", kept["local_steps"]))
        wanted: List[Tuple[str, bool]] = [
            ("shared", bool(kept["local_steps"])),
            ("momentum", self._outer is not None),
        ]
        for part, needed in wanted:
            found = {name: tuple(tensor.shape) for name, tensor in kept[part].items()}
            if found != (
                {each.name: tuple(each.param.shape) for each in self._parameters} if needed else {}
            ):
                raise ValueError(
                    f"this state does not fit: its {part} values are {found or 'none'}. Has it "
                    f"other options, or another model?"
                )
            for name, tensor in kept[part].items():
                if not torch.isfinite(tensor).all():
                    raise ValueError(
                        f"this state does not fit: the {part} values of {name} are not finite, and "
                        "no step would be again: load an older one"
                    )

    def _check_groups(self, groups: List[Dict[str, Any]]) -> None:
        found, expected = (
            [len(group["params"]) for group in each] for each in (groups, self.param_groups)
        )
        if found != expected:
            raise ValueError(
                f"this state does not fit: its parameter groups have {found} parameters, those of "
                f"the optimizer {expected}"
            )
