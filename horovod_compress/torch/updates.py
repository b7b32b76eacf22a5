"""An optimizer whose ranks exchange what they would add to the parameters, compressed, in place of
gradients."""

import contextlib
import copy
import zlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import horovod.torch as hvd
import numpy as np
import torch

from .. import checkpoint
from ..binding import warn_once
from ..deprecated import by_name
from ..handshake import MismatchError
from ..updates import Nesterov, check_ranks_of_set, check_rounds
from .adam import AdamW
from .horovod_internals import let_broadcast_begin, own_class
from .outside_step import Probe, watch
from .parameters import NamedParameters, Slot, flat_memory, loses_numbers, named
from .state_names import rekeyed, renaming
from .update_compression import UpdateCompression

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


class _Parameter(Slot):
    """A parameter with the value that all ranks share, and where an outer optimizer has one, its
    momentum."""

    def __init__(self, name: str, param: torch.Tensor, outer: Optional[Nesterov]) -> None:
        super().__init__(name, param)
        self.shared = torch.empty_like(param, requires_grad=False)
        dtype = torch.promote_types(param.dtype, torch.float32)
        self.momentum = torch.zeros_like(param, dtype=dtype, requires_grad=False) if outer else None
        # The update, until the exchange is over.
        self.loaded = self.shared
        # Whether the exchange itself subtracts and adds the shared value.
        self._in_place = False

    def begin(self) -> None:
        self.shared.copy_(self.param)

    def update(self, compression: UpdateCompression) -> Tuple[str, Any, Any]:
        """What local steps have added, as `UpdateCompression.exchange` takes it: in the parameter's
        own memory where possible."""
        exchange = compression._exchange
        on_device = exchange.on_device(self.name)
        own, base = (flat_memory(tensor, on_device) for tensor in (self.param.data, self.shared))
        self._in_place = self.momentum is None and own is not None and base is not None
        if self._in_place:
            return self.name, own, base
        self.param.sub_(self.shared)
        carries_float64 = exchange.carries_float64(self.name)
        self.loaded, flat = self.load(self.param.data, on_device, carries_float64)
        if not compression._has_told_of_float32 and loses_numbers(self.param.data, self.loaded):
            compression._tell_of_float32(self.name)
        return self.name, flat, None

    def give_up(self) -> None:
        self.param.copy_(self.shared)

    def apply(self, outer: Optional[Nesterov]) -> None:
        """Adds the mean of all ranks' updates, which `update` has become, to the shared value."""
        if self._in_place:
            return
        if outer is not None and self.momentum is not None:
            self.momentum = (
                self.momentum.to(self.loaded.device).mul_(outer.momentum).add_(self.loaded)
            )
            self.loaded.add_(self.momentum, alpha=outer.momentum).mul_(outer.lr)
        if self.loaded.data_ptr() == self.param.data_ptr():
            self.param.add_(self.shared)
        else:
            # In the wider of both types, and rounded once.
            self.param.copy_(self.shared).add_(self.loaded.to(self.param.device))


class _Beginning(torch.optim.Optimizer):
    """What an UpdateOptimizer is to hvd.broadcast_optimizer_state on ranks whose optimizer has no
    state yet: they take this step, in which no other rank takes part."""

    _optimizer: torch.optim.Optimizer
    _parameters: List[_Parameter]
    _inside: bool

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """Makes the optimizer's state, and leaves parameters as they are."""
        before = [each.param.clone() for each in self._parameters]
        self._inside = True
        try:
            self._optimizer.step()
        finally:
            self._inside = False
            for each, values in zip(self._parameters, before):
                each.param.copy_(values)
        warn_once(_NOT_NEEDED)


class UpdateOptimizer(_Beginning):
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
        names = _trained(optimizer, named_parameters)
        options = {"every": every, "outer": repr(outer)}
        self.compression = UpdateCompression(
            compression,
            {name: tuple(param.shape) for name, param in names.items()},
            options,
            process_set,
        )
        self._optimizer, self._every, self._outer = optimizer, every, outer
        self._parameters = [_Parameter(name, param, outer) for name, param in names.items()]
        self._known = {id(param) for param in names.values()}
        self.local_steps = 0  # since the last exchange
        # Whether this is within `shared_parameters`.
        self._shows_shared = False
        # Whether, in an elastic job, parameters are to be the shared values which that went back
        # to.
        self._shared_is_kept = False
        # Whether the optimizer itself is at work.
        self._inside = False
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
                    parameter.give_up()
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
            sums = {each.name: _checksum(each.shared) for each in self._parameters}
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
            sums = [_checksum(each) for each in values.values()]
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
                parameter.apply(self._outer) if finite else parameter.give_up()
            if not finite:
                self.compression.abandon()
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

    # -- for elastic jobs: see `elastic.py`

    def _kept(self, into: Optional[Dict[str, Any]] = None, begun: bool = False) -> Dict[str, Any]:
        """A round that has begun, on this rank or on another, is kept as one that has not: with
        what local steps have added among what the next exchange is to send."""
        return {
            "compression": self.compression._kept(
                into["compression"] if into else None,
                self._added() if begun or self.local_steps else {},
            ),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "shared": {
                each.name: (each.shared if self.local_steps else each.param).detach().clone()
                for each in self._parameters
            },
            "momentum": {
                each.name: each.momentum.clone()
                for each in self._parameters
                if each.momentum is not None
            },
        }

    def _added(self) -> Dict[str, np.ndarray]:
        if not self.local_steps:
            return {
                each.name: np.zeros(each.param.numel(), np.float32) for each in self._parameters
            }
        return {
            each.name: each.load(each.param.detach() - each.shared)[1].copy()
            for each in self._parameters
        }

    @torch.no_grad()
    def _go_back_to(self, state: Dict[str, Any]) -> None:
        self.compression._go_back_to(state["compression"])
        # Which would go on in the tensors that it is given.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for each in self._parameters:
            each.shared.copy_(state["shared"][each.name])
            if each.momentum is not None:
                each.momentum.copy_(state["momentum"][each.name])
        self._give_up_round()
        self._shared_is_kept = True

    def _give_up_round(self) -> None:
        self.local_steps = 0
        for each in self._parameters:
            each.give_up()

    @torch.no_grad()
    def _sync(self) -> None:
        """All ranks go on from what rank 0 shares. Ranks that stay keep their optimizer's own
        state, and those that have just begun take rank 0's."""
        # What the elastic state itself does with the model brings a rank's own parameters.
        if self.local_steps or self._shared_is_kept:
            self._give_up_round()
        steps = self.compression.of_all(self.compression._exchange.steps_taken())
        self.compression._sync()
        if len(set(steps)) > 1:
            state = hvd.broadcast_object(
                self._optimizer.state_dict(), root_rank=0, name="hvdc.elastic.optimizer"
            )
            if steps[hvd.rank()] != steps[0]:
                self._optimizer.load_state_dict(state)
        shared = [(each.name, each.param) for each in self._parameters]
        momenta = [
            (f"{each.name}.momentum", each.momentum)
            for each in self._parameters
            if each.momentum is not None
        ]
        hvd.broadcast_parameters([*shared, *momenta], root_rank=0)

    @torch.no_grad()
    def _even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """As of compressions. A round that has begun ends here."""
        if any(self.compression.of_all(self.local_steps)):
            self._go_back_to(self._kept(begun=True))
        return {**saved, "compression": self.compression._even_out(saved["compression"])}

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


def _trained(
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
    for name, param in trained.values():
        if not param.is_floating_point():
            raise ValueError(
                f"{name}: a parameter of {param.dtype} cannot be compressed; real floating point "
                f"is needed"
            )
    return dict(trained.values())


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
