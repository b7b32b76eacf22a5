"""All that relies on how fully_shard is written: tried with PyTorch 2.13."""

from typing import Any, Callable, List

import torch
from torch import nn

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
except ImportError:
    raise ImportError(
        f"horovod_compress.fsdp needs torch.distributed.fsdp.fully_shard, which PyTorch "
        f"{torch.__version__} has not. It was tried with 2.13"
    ) from None


class Unit:
    """Parameters that fully_shard reduces together.

    Args:
        state: FSDP's, of one module or several.
        group: FSDP's, of the parameters.
    """

    def __init__(self, state: Any, group: Any) -> None:
        self._state, self._group = state, group

    @property
    def params(self) -> List[torch.Tensor]:
        """Looked up, because loading a model may put others in their place."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def is_replicated(self) -> bool:
        """True where FSDP itself reduces over replicas."""
        return self._group.mesh_info.replicate_mesh_dim is not None

    @property
    def is_offloaded(self) -> bool:
        """True where parameters are in the CPU's memory, and computed with elsewhere."""
        return isinstance(self._group.offload_policy, CPUOffloadPolicy)

    @property
    def has_hook(self) -> bool:
        """True where somebody has set a hook."""
        return self._group._all_reduce_hook is not None

    @property
    def adds_up(self) -> bool:
        """True where users have asked for sums over ranks, divided by a number of their own."""
        return self._group.gradient_divide_factor is not None

    @property
    def waits(self) -> bool:
        """True where users have said that more backward passes come before gradients are used."""
        return not (self._group.all_reduce_grads and self._state._state_ctx.is_last_backward)

    @property
    def in_backward(self) -> bool:
        """True until FSDP's own work in a backward pass is over."""
        return self._state._state_ctx.post_backward_final_callback_queued

    def set_hook(self, hook: Callable[["Unit"], None]) -> None:
        """Has hook(self) called in each backward pass when gradients have been reduced over the
        mesh, before they are in `param.grad`."""
        self._group.modules[0].set_all_reduce_hook(lambda _: hook(self))


def units_of(model: nn.Module) -> List[Unit]:
    """The units of a model.

    Raises:
        RuntimeError: this PyTorch's FSDP is written in another way.
        ValueError: one module has parameters over several meshes.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        # One may be of several modules.
        states = dict.fromkeys(module._get_fsdp_state() for module in modules)
        units = [Unit(state, group) for state in states for group in state._fsdp_param_groups]
        if any(len(state._fsdp_param_groups) > 1 for state in states):
            raise ValueError(
                "fully_shard has cut one module over several meshes (ShardPlacementResult), and "
                "calls no hook for it: compress updates by fsdp.UpdateOptimizer"
            )
        # What is missing is known now.
        any((its.params, its.adds_up, its.waits, its.in_backward, its.has_hook) for its in units)
    except AttributeError as error:
        raise RuntimeError(
            f"fully_shard of PyTorch {torch.__version__} is not as in 2.13, with which "
            f"horovod_compress.fsdp was tried: {error}. fsdp.UpdateOptimizer needs less of it"
        ) from error
    return units
