"""An optimizer whose ranks exchange what they would add to the parameters, compressed, in place of
gradients, and that compression, whoever moves it."""

import contextlib
import functools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch

from ..engine import checkpoint
from ..engine.exchange import Exchange
from ..protocol.handshake import MismatchError, gather
from ..session.bound import Bound
from ..session.choice import Choice
from ..session.notices import warn_once
from ..session.port import Port
from ..session.session import Session
from ..session.updates import Nesterov, average, check_rounds, compressor_for_updates, make_alike
from . import shards
from .optimizer_around import OptimizerAround, Probe, check_inner, check_one_state, watch
from .parameters import NamedParameters, Slot, checksum, flat_memory, places_of, trained
from .state_names import rekeyed, renaming
from .steps import bring_means


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
        return shards.local(self.param).detach()

    def swap(self) -> None:
        """Exchanges its values and the shared ones."""
        if shards.is_shard(self.param):
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
        super().__init__(Session(ranks, self, spec))
        self._exchange: Exchange = self._session.exchange

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

    def mean(self, names: str, tensors: Dict[str, torch.Tensor]) -> None:
        """Makes tensors their mean over ranks. names: the beginning of names of collectives."""
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


class UpdatingOptimizer(OptimizerAround):
    """The base of the UpdateOptimizers of Horovod and DDP."""

    def _begin_with(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Optional[NamedParameters],
        every: int,
        outer: Optional[Nesterov],
        ranks: Callable[[], Any],
        spec: Any,
        broadcast: str,
    ) -> None:
        """Begins as UpdateOptimizer's arguments say. ranks: makes those of `UpdateCompression`;
        spec, broadcast: as there."""
        check_inner(optimizer, "UpdateOptimizer")
        check_rounds(every, outer)
        names = trained(optimizer, named_parameters)
        options = {"every": every, "outer": repr(outer)}
        self.compression = UpdateCompression(ranks(), spec, names, options, broadcast)
        self._session, self._outer = self.compression._session, outer
        self._parameters = [SharedParameter(name, param, outer) for name, param in names.items()]
        # Whether this is within `shared_parameters`.
        self._shows_shared = False
        # Whether, in an elastic job, parameters are to be the shared values which that went back
        # to.
        self._shared_is_kept = False
        self._methods = watch(optimizer, self._outside_step)
        self._surround(optimizer, every, names.values())

    def __repr__(self) -> str:
        id = self.compression.config["id"]
        return f"UpdateOptimizer({self._optimizer!r}, {id}, every {self._every})"

    def _local_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        try:
            return super()._local_step(closure)
        except BaseException:
            # Else the next step would take what this one has left for what all ranks share.
            if not self.local_steps:
                self._rollback_round()
            raise

    def _rollback_round(self) -> None:
        self.local_steps = 0
        for parameter in self._parameters:
            parameter.rollback()

    def _begin(self) -> None:
        if self._shows_shared:
            raise RuntimeError(
                "within `with optimizer.shared_parameters():` the model has not this rank's "
                "parameters: take the step after it"
            )
        self._refuse_unknown()
        for parameter in self._parameters if not self.local_steps else ():
            parameter.shared.copy_(parameter.values)
        self._shared_is_kept = False
        if not self._session.agreed:
            sums = {each.name: checksum(each.shared) for each in self._parameters}
            self.compression.begin(sums, self.local_steps)
            self._go_on_from_all()

    def _go_on_from_all(self) -> None:
        """MismatchError where ranks have loaded states of different steps."""
        steps = self.compression.steps_of_all()
        if len(set(steps)) > 1:
            raise MismatchError(
                f"ranks have loaded states of different steps, {steps} in rank order: load on "
                "every rank what that rank has saved at one step, or a portable state"
            )

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
        before = Probe([each.values for each in self._parameters])
        with self._at_work():
            yield
        # The method may have given them other memory.
        values = {each.name: each.values for each in self._parameters}
        if Probe(list(values.values())).differs(before):
            sums = [checksum(each) for each in values.values()]
            make_alike(self._session.ranks, method, sums, values, self.compression.mean)

    def _exchange(self) -> None:
        if self._outer is None and not self._session.ranks.active:
            self.local_steps = 0
            # A rank alone has its parameters already.
            return
        finite, driver = False, self._session.exchange
        # A step is under way until all parameters have what came of it.
        try:
            with driver.held():
                updates = (parameter.update(self._session) for parameter in self._parameters)
                finite = self.compression.exchange(updates)
        finally:
            with driver.held():
                self.local_steps = 0
                for parameter in self._parameters:
                    parameter.apply(self._outer) if finite else parameter.rollback()
            driver.rollback()
            driver.end_step()
        if not finite:
            self._warn_of_moments()

    def _warn_of_moments(self) -> None:
        """Warns, after an exchange of updates that were not finite, where this rank's will never be
        again."""
        for each in self._parameters:
            for key, value in self.state.get(each.param, {}).items():
                if torch.is_tensor(value) and not torch.isfinite(shards.local(value)).all():
                    warn_once(
                        f"rank {self._session.exchange.now.rank}'s optimizer holds numbers that "
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
        self._swap(swapped)
        try:
            yield
        finally:
            self._shows_shared = shown_before
            self._swap(swapped)

    def _swap(self, swapped: List[SharedParameter]) -> None:
        for each in swapped:
            each.swap()

    @torch.no_grad()
    def average_state(self) -> None:
        """Makes the optimizer's own tensors, such as Adam's moments, their mean over ranks. All
        ranks call it; it sends them densely. MismatchError where some rank has no moments of a
        parameter yet, TypeError, on all ranks, where these are of a type of their own, as in 8
        bits."""
        found = {
            f"{each.name}.{key}": shards.local(value)
            for each in self._parameters
            for key, value in sorted(self.state.get(each.param, {}).items())
            if torch.is_tensor(value)
            and value.is_floating_point()
            # Not what counts steps.
            and (value.dim() or not each.param.dim() and key != "step")
        }
        mean = functools.partial(_mean_of_plain, self.compression)
        average(self._session.ranks, found, mean)

    def switch(self, spec: Any) -> None:
        """Another compression from the next exchange on; see `UpdateCompression.switch`. So
        training may begin with "none"."""
        self.compression.switch(spec)

    # -- saved and loaded

    def _momenta(self) -> Dict[str, torch.Tensor]:
        """Those of the outer optimizer, by parameter; none without one."""
        return {each.name: each.momentum for each in self._parameters if each.momentum is not None}

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
        momentum = {name: its.clone() for name, its in self._momenta().items()}
        for each in self._parameters if portable and momentum else ():
            momentum[each.name] = shards.like(momentum[each.name], each.param)
        kept = {
            "compression": self.compression.state_dict(portable),
            "local_steps": local_steps,
            "shared": {each.name: each.shared.clone() for each in self._parameters if local_steps},
            "momentum": momentum,
        }
        return {**self._optimizer.state_dict(), "updates": kept}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continues from what state_dict has returned, or from the optimizer's own; called on all
        ranks, which compare parameters in the next step. ValueError, with nothing changed, for what
        does not fit."""
        if self._shows_shared:
            raise RuntimeError(
                "load states before or after `with optimizer.shared_parameters():`, not within it"
            )
        check_one_state(state_dict, "UpdateOptimizer")
        kept: Any = state_dict.get("updates")
        if kept is not None:
            try:
                # By the names that parameters have here.
                found = renaming(kept["compression"], [each.name for each in self._parameters])
                kept = {**kept, "compression": rekeyed(kept["compression"], found)}
                kept = rekeyed(kept, found)
                self._check(kept)
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"not a state_dict of an UpdateOptimizer: {error!r}") from None
            self._check_groups(state_dict["param_groups"])
            self.compression.load_state_dict(kept["compression"])
        self._optimizer.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "updates"}
        )
        self.local_steps = kept["local_steps"] if kept is not None else 0
        for each in self._parameters if self.local_steps else ():
            each.shared.copy_(kept["shared"][each.name])
        for name, momentum in self._momenta().items() if kept is not None else ():
            momentum.copy_(shards.local(kept["momentum"][name]))
        # What ranks have loaded is compared in their next step.
        self._session.agreed = False

    def _check(self, kept: Dict[str, Any]) -> None:
        checkpoint.refuse(checkpoint.wrong_count("local_steps", kept["local_steps"]))
        for part, needed in (
            ("shared", kept["local_steps"] > 0),
            ("momentum", self._outer is not None),
        ):
            found = {name: tuple(shards.local(tensor).shape) for name, tensor in kept[part].items()}
            if found != (
                {each.name: tuple(each.shape) for each in self._parameters} if needed else {}
            ):
                raise ValueError(
                    f"this state does not fit: its {part} values are {found or 'none'}. Has it "
                    f"other options, or another model?"
                )
            for name, tensor in kept[part].items():
                if not torch.isfinite(shards.local(tensor)).all():
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


def _mean_of_plain(
    compression: UpdateCompression, names: str, tensors: Dict[str, torch.Tensor]
) -> None:
    """As of `UpdateCompression.mean`, for an optimizer's own tensors. TypeError for those that are
    not PyTorch's plain ones, before anything travels."""
    for name, its in tensors.items():
        if type(its) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is a {type(its).__name__}, of which no mean is taken: save state_dict() "
                "of this optimizer on every rank instead"
            )
    compression.mean(names, tensors)
