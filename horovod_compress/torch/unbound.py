"""Compressions that find their optimizer by themselves, and one that is chosen on the job."""

import dataclasses
import functools
import weakref
from typing import Any, Optional, Sequence, Tuple, Type

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..compressors.advice import ADAM
from ..compressors.base import Compressor
from ..session.auto import auto_of
from ..session.unbound import NotBoundError, Unbound
from ..torch_common.optimizers import before_closures
from . import horovod_internals
from .compression import BoundCompression


class UnboundCompression(Unbound):
    """A compression for hvd.DistributedOptimizer(compression=…), which has named parameters,
    momentum, weight decay and process set for it.

    Args:
        spec: as of `BoundCompression`.
        process_set: need not be given, and must be that of Horovod's optimizer.
        grad_scaler: as of `BoundCompression`.
        discardable: as of `BoundCompression`.

    Raises:
        ValueError: as of `BoundCompression`.
    """

    _bound_class: Type[BoundCompression] = BoundCompression

    def __init__(
        self,
        spec: Any,
        *,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        super().__init__(
            spec, process_set=process_set, grad_scaler=grad_scaler, discardable=discardable
        )
        # To an optimizer each, which keeps it.
        self._bound: "weakref.WeakSet[BoundCompression]" = weakref.WeakSet()
        # Of those; kept, because users may ask it when the optimizer is gone.
        self._last: Optional[BoundCompression] = None
        self._moments = self._compressor.policy.moments
        # What these need is seen before there are gradients.
        if self._moments != "minibatch":
            self._hook = register_module_forward_pre_hook(
                torch.compiler.disable(self._before_forward)
            )

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Called by Horovod with the first gradient of an optimizer. That has its own compression
        from then on."""
        optimizer = horovod_internals.optimizer_of(self)
        if self._moments != "minibatch":
            raise RuntimeError(
                f"moments={self._moments} begins with a forward pass of the model, and none came "
                f"after hvd.DistributedOptimizer was made: give the "
                f"compression optimizer and parameters, as in "
                f"hvdc.Compression.{self._compressor.id}"
                f"(optimizer, named_parameters=model.named_parameters(), …)"
            )
        return self.bind(optimizer).compress(tensor)

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with sparse gradients, which it reduces by itself, of an optimizer that
        has no others."""
        return tensor

    def bind(self, optimizer: torch.optim.Optimizer) -> BoundCompression:
        """The compression that serves this optimizer of Horovod's from now on."""
        process_set = self._options["process_set"] or horovod_internals.process_set_of(optimizer)
        bound = self.made_for(optimizer, horovod_internals.named_of(optimizer), process_set)
        bound._serving.begin(optimizer)
        horovod_internals.serve(optimizer, bound)
        self._bound.add(bound)
        self._last = bound
        return bound

    def made_for(
        self, optimizer: Optional[torch.optim.Optimizer], named_parameters: Any, process_set: Any
    ) -> BoundCompression:
        """A bound compression with the options of this one."""
        options = {**self._options, "process_set": process_set}
        return self._bound_class(
            self._asked, optimizer, named_parameters=named_parameters, **options
        )

    def the_only(self) -> BoundCompression:
        unserved = [] if len(self._bound) == 1 else horovod_internals.holders_of(self)
        if len(self._bound) + len(unserved) > 1:
            raise NotBoundError(
                "several optimizers have this compression, and each its own of it: ask "
                "hvdc.compression_of(optimizer)"
            )
        bound = self.bind(unserved[0]) if unserved else self._last
        if bound is None:
            raise NotBoundError(
                "no optimizer has this compression yet: give it to "
                "hvd.DistributedOptimizer(compression=…) first"
            )
        return bound

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._hook.remove()
            for optimizer in horovod_internals.holders_of(self):
                self.bind(optimizer)


class AutoCompression(UnboundCompression):
    """A compression for hvd.DistributedOptimizer that chooses among candidates while training
    begins, as `Trials` says.

    It weighs speed only, not how well a candidate trains. The rule: another candidate than the
    first, the dense one, wins if its median step is shorter by more than the margin and by more
    than both interquartile ranges together, with eight steps of each, or if every dense step took
    over twice its median. Candidates take turns of three steps, of which the first does not count.

    Each step that is tried is a step of training, and what a candidate has held back goes on with
    the next: nothing is lost. How long a step takes is seen from one to the next, so all that
    happens in one counts, and the slowest rank's seconds count. Where steps later take 1.3 times as
    long as they did for 50 steps, candidates are tried again.

    Args:
        candidates: specs, the dense one first; default: none, fp16, and for an SGD 1 % by dgc
            (where it has momentum) or topk, with two limits for small tensors.
        probe_steps: at most so many steps are tried.
        margin: a share of the dense one's median step.
        grad_scaler: as of `BoundCompression`.
        discardable: as of `BoundCompression`.
        process_set: as of `UnboundCompression`.

    Raises:
        ValueError: bad candidates, or an elastic job.
    """

    def __init__(
        self,
        *,
        candidates: Optional[Sequence[str]] = None,
        probe_steps: int = 30,
        margin: float = 0.05,
        grad_scaler: Any = None,
        discardable: bool = False,
        process_set: Any = None,
    ) -> None:
        super().__init__(
            "none", process_set=process_set, grad_scaler=grad_scaler, discardable=discardable
        )
        asked = {"candidates": candidates, "probe_steps": probe_steps, "margin": margin}
        self._asked = auto_of({"id": "auto", **asked})

    def _made_again(self) -> Tuple[Any, ...]:
        return functools.partial(type(self), **dataclasses.asdict(self._asked), **self._options), ()

    def __repr__(self) -> str:
        return "<a compression that is chosen when training begins>"

    @property
    def compressor(self) -> Compressor:
        """Raises ValueError."""
        raise ValueError(
            f"auto() tries compressions of gradients: name one for updates, such as {ADAM.spec}"
        )


def compression_of(optimizer: torch.optim.Optimizer) -> Optional[BoundCompression]:
    """The compression that an optimizer was given, bound to it now where that has not happened yet.

    Args:
        optimizer: what hvd.DistributedOptimizer has returned, or what wraps that.

    Returns:
        The compression, or None for optimizers without one of this package.
    """
    given = horovod_internals.compression_of(optimizer)
    if not isinstance(given, (BoundCompression, UnboundCompression)):
        return None
    optimizer = horovod_internals.itself(optimizer)
    given = horovod_internals.compression_of(optimizer)
    bound: Any = given.bind(optimizer) if isinstance(given, UnboundCompression) else given
    bound._serving.begin(optimizer)
    return bound


before_closures(compression_of)
