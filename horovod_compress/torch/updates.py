"""An optimizer whose ranks exchange what they would add to the parameters, compressed, in place of
gradients."""

import contextlib
from typing import Any, Callable, Dict, Iterator, Optional

import torch

from ..binding import warn_once
from ..deprecated import by_name
from ..handshake import MismatchError
from ..pytorch.optimizers import own_class
from ..pytorch.outside_step import Probe, watch
from ..pytorch.parameters import NamedParameters
from ..updates import Nesterov, check_ranks_of_set, check_rounds
from .adam import AdamW
from .horovod_internals import let_broadcast_begin
from .shared import SharedParameter, checksum, trained
from .update_compression import UpdateCompression
from .update_state import KeepsUpdates

_ONE_STATE = (
    "rank 0 has loaded a state of its UpdateOptimizer, and other ranks have not: all go on from "
    "rank 0's, its optimizer's state too, without what the others had not sent. Load on every rank "
    "what that rank has saved, or a portable state, and delete the line "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)


class UpdateOptimizer(KeepsUpdates):
    """Makes an optimizer a compressed one.

    Each rank takes its own step with its own gradients. What the step adds to the parameters is
    compressed with error feedback and exchanged, and all ranks add the mean. So the optimizer's
    momentum, second moments, weight decay and learning rate are inside what is sent, and nothing is
    taken over from it.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = hvdc.UpdateOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression="topk:ratio=0.01"
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    It takes the place of hvd.DistributedOptimizer: Horovod reduces no gradients. Parameters are
    bit-identical on all ranks after each exchange; the optimizer's own state is each rank's.

    optimizer: any torch optimizer but L-BFGS, with real floating-point parameters. Its parameter
        groups are this one's, so schedulers may have either, and so are its methods: call them on
        either. Where one changes parameters outside of step(), as train() and eval() of
        schedule-free optimizers do, all ranks call it, and parameters become their mean over ranks,
        bit-identical.
    named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered by
    parameter group. compression: a spec, as for horovod_compress.get_compressor, or
    hvdc.Compression.topk(…). dgc selects as topk does here. every: how many local steps come before
    each exchange (H of DiLoCo, arXiv 2311.08105). In between ranks' parameters differ. outer: what
    is done with the mean update; default: it is added. `hvdc.Nesterov()` is DiLoCo's. process_set:
    the ranks that exchange; default: all.

    A copy of the parameters is kept, which an optimizer needs that looks at them. A rank whose
    GradScaler has found infinite gradients skips its own step and takes part with an update of
    zero; each rank's loss scale is its own. Where an update is not finite on some rank, no rank's
    parameters move, and what was to be sent waits for the next exchange, where a residual is kept
    of it; an exchange that fails leaves the shared parameters.

    Raises ValueError for bad options. The first step raises MismatchError, on all ranks, where
    ranks were started differently or begin with different parameters.
    """

    # A GradScaler then calls step() on every rank, whatever it has found, and says so.
    _step_supports_amp_scaling = True

    @by_name
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        named_parameters: Optional[NamedParameters] = None,
        compression: Any = "topk:ratio=0.01",
        every: int = 1,
        outer: Optional[Nesterov] = None,
        process_set: Any = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"UpdateOptimizer needs a torch optimizer, not an object of {type(optimizer)}: "
                "give it the optimizer that has the parameters, and put what is none around the "
                "UpdateOptimizer"
            )
        if isinstance(optimizer, UpdateOptimizer) or own_class(optimizer) is not type(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} exchanges already: give UpdateOptimizer the optimizer "
                f"itself"
            )
        _refuse_lbfgs(optimizer)
        check_rounds(every, outer)
        for group in optimizer.param_groups if isinstance(optimizer, AdamW) else ():
            check_ranks_of_set(group["ranks"], process_set)
        names = trained(optimizer, named_parameters)
        options = {"every": every, "outer": repr(outer)}
        exchange = UpdateCompression(
            compression,
            {name: tuple(param.shape) for name, param in names.items()},
            options,
            process_set,
        )
        parameters = [SharedParameter(name, param, outer) for name, param in names.items()]
        super().__init__(optimizer, exchange, parameters, every, outer)
        self._known = {id(param) for param in names.values()}
        self._methods = watch(optimizer, self._outside_step)
        let_broadcast_begin(self)
        # In place of torch's __init__, which would make parameter groups of its own: hooks, and
        # step() that calls them.
        self.__setstate__({})

    # The optimizer's own, also after that has loaded others.
    param_groups = property(lambda self: self._optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self._optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self._optimizer.defaults)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """What the optimizer has beside what every optimizer has, such as train() and eval()."""
        if name.startswith("_") and name not in self.__dict__.get("_methods", ()):
            raise AttributeError(f"'UpdateOptimizer' object has no attribute '{name}'")
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        id = self.compression.config["id"]
        return f"UpdateOptimizer({self._optimizer!r}, {id}, every {self._every})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an UpdateOptimizer is part of an exchange of ranks, and cannot be copied or pickled: "
            "save its state_dict()"
        )

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Raises ValueError."""
        raise ValueError(
            "parameters cannot be added to an UpdateOptimizer: add them to the optimizer before"
        )

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step of the optimizer on this rank, and after every so many of them the exchange, which
        waits for all ranks."""
        self._begin()
        try:
            loss = self._local_step(closure)
        except BaseException:
            # Else the next step would take what this one has left for what all ranks share.
            if not self.local_steps:
                for parameter in self._parameters:
                    parameter.rollback()
            raise
        self.local_steps += 1
        if self.local_steps >= self._every:
            self._exchange()
        return loss

    @torch.no_grad()
    def take_part(self) -> None:
        """Exchanges now, with what local steps have added so far, or with nothing: for a rank
        without data or late, while others come to the end of their steps. All ranks must exchange
        equally often."""
        self._begin()
        self._exchange()

    def _begin(self) -> None:
        if self._shows_shared:
            raise RuntimeError(
                "within `with optimizer.shared_parameters():` the model has not this rank's "
                "parameters: take the step after it"
            )
        unknown = [
            i
            for i, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.requires_grad and id(p) not in self._known
        ]
        if unknown:
            raise ValueError(
                f"parameter group {unknown[0]} has parameters that came, or were frozen, when this "
                f"UpdateOptimizer was made: make a new one for them"
            )
        for parameter in self._parameters if not self.local_steps else ():
            parameter.begin()
        self._shared_is_kept = False
        if not self.compression._agreed:
            sums = {each.name: checksum(each.shared) for each in self._parameters}
            self.compression.begin(sums, self.local_steps)
            self._go_on_from_rank_0()

    def _go_on_from_rank_0(self) -> None:
        """Where rank 0 alone has loaded a state, as scripts for Horovod do that resume, all ranks
        go on from that."""
        steps = self.compression.steps_of_all()
        if len(set(steps)) == 1:
            return
        of_all_ranks = self.compression._process_set.process_set_id == 0
        if not of_all_ranks or any(each not in (0, steps[0]) for each in steps):
            raise MismatchError(
                f"ranks have loaded states of different steps, {steps} in rank order: load on "
                "every rank what that rank has saved at one step, or a portable state"
            )
        self._sync()
        if self.compression._exchange.rank == 0:
            warn_once(_ONE_STATE)

    def _local_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        # A GradScaler's.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return None
        if scale is not None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.div_(scale.to(param.grad.device))
        self._inside = True
        try:
            return self._optimizer.step(closure) if closure is not None else self._optimizer.step()
        finally:
            self._inside = False

    @contextlib.contextmanager
    def _outside_step(self, method: str) -> Iterator[None]:
        """Around a method of the optimizer's own. What that makes of parameters depends on the
        optimizer's state, which is each rank's own: all ranks take the mean of what they have
        then."""
        if self._inside:
            yield
            return
        if self._shows_shared:
            raise RuntimeError(
                f"call {method}() before or after `with optimizer.shared_parameters():`, not in it"
            )
        params = [each.param for each in self._parameters]
        before = Probe(params)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        if Probe(params).differs(before):
            values = {each.name: each.param.detach() for each in self._parameters}
            sums = [checksum(each) for each in values.values()]
            self.compression.make_alike(method, sums, values)

    def _exchange(self) -> None:
        if self._outer is None and not self.compression._active:
            self.local_steps = 0
            # A rank alone has its parameters already.
            return
        finite = False
        try:
            updates = (parameter.update(self.compression) for parameter in self._parameters)
            finite = self.compression.exchange(updates)
        finally:
            self.local_steps = 0
            for parameter in self._parameters:
                parameter.apply(self._outer) if finite else parameter.rollback()
            if not finite:
                self.compression.rollback()
        if not finite:
            self._warn_of_moments()

    def _warn_of_moments(self) -> None:
        """Warns, after an exchange of updates that were not finite, where this rank's will never be
        again."""
        for each in self._parameters:
            for key, value in self.state.get(each.param, {}).items():
                if torch.is_tensor(value) and not torch.isfinite(value).all():
                    warn_once(
                        f"rank {self.compression._exchange.rank}'s optimizer holds numbers that "
                        f"are not finite, {key} of {each.name}: so will be its "
                        "updates, and no rank's parameters move. Load the last saved states on all "
                        "ranks, and take no step where loss or gradients "
                        "are not finite"
                    )
                    return

    @contextlib.contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Within it the model has the parameters that all ranks share, those after the last
        exchange, for evaluation and for saving, and `state_dict` goes with these; after it, this
        rank's own again."""
        swapped = self._parameters if self.local_steps and not self._shows_shared else []
        shown_before, self._shows_shared = self._shows_shared, True
        for each in swapped:
            each.param.data, each.shared = each.shared, each.param.data
        try:
            yield
        finally:
            self._shows_shared = shown_before
            for each in swapped:
                each.param.data, each.shared = each.shared, each.param.data

    @torch.no_grad()
    def average_state(self) -> None:
        """Makes the optimizer's own tensors, such as Adam's moments, their mean over ranks. All
        ranks call it; it sends them densely. MismatchError where some rank has no moments of a
        parameter yet."""
        self.compression.average(
            {
                f"{each.name}.{key}": value
                for each in self._parameters
                for key, value in sorted(self.state.get(each.param, {}).items())
                if torch.is_tensor(value) and value.is_floating_point() and value.dim()
            }
        )

    def switch(self, spec: Any) -> None:
        """Another compression from the next exchange on; see `UpdateCompression.switch`. So
        training may begin with "none"."""
        self.compression.switch(spec)


def _refuse_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    """ValueError for an optimizer that takes parameters to be where its last step has left them."""
    names = [each.__name__ for each in type(optimizer).__mro__]
    kin = next((name for name in names if "lbfgs" in name.lower()), None)
    if kin is not None:
        raise ValueError(
            f"{kin} learns curvature from how far its own last step went and how the gradient has "
            "changed since. Here parameters go where the mean of all ranks' steps takes them, so "
            "the two do not belong together, and it diverges: give UpdateOptimizer an optimizer "
            "that does not look back at its own steps, such as SGD or AdamW"
        )
