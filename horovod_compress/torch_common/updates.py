"""An optimizer whose ranks exchange what they would add to the parameters, compressed, in place of
gradients, whoever moves that."""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch

from ..engine import checkpoint
from ..protocol.handshake import MismatchError
from ..session.notices import warn_once
from ..session.updates import Nesterov, check_rounds
from .optimizer_around import OptimizerAround, check_inner, check_one_state
from .optimizer_methods import Probe, watch
from .parameters import NamedParameters
from .shards import like, local
from .shared_parameters import SharedParameter, checksum, trained
from .state_names import rekeyed, renaming
from .update_compression import UpdateCompression


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
            self.compression.make_alike(method, sums, values)

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
                if torch.is_tensor(value) and not torch.isfinite(local(value)).all():
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
        parameter yet."""
        self.compression.average(
            {
                f"{each.name}.{key}": local(value)
                for each in self._parameters
                for key, value in sorted(self.state.get(each.param, {}).items())
                if torch.is_tensor(value)
                and value.is_floating_point()
                # Not what counts steps.
                and (value.dim() or not each.param.dim() and key != "step")
            }
        )

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
        if portable:
            momentum = {
                each.name: like(momentum[each.name], each.param)
                for each in self._parameters
                if each.name in momentum
            }
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
            momentum.copy_(local(kept["momentum"][name]))
        # What ranks have loaded is compared in their next step.
        self._session.agreed = False

    def _check(self, kept: Dict[str, Any]) -> None:
        checkpoint.refuse(checkpoint.wrong_count("local_steps", kept["local_steps"]))
        for part, needed in (
            ("shared", kept["local_steps"] > 0),
            ("momentum", self._outer is not None),
        ):
            found = {name: tuple(local(tensor).shape) for name, tensor in kept[part].items()}
            if found != (
                {each.name: tuple(each.shape) for each in self._parameters} if needed else {}
            ):
                raise ValueError(
                    f"this state does not fit: its {part} values are {found or 'none'}. Has it "
                    f"other options, or another model?"
                )
            for name, tensor in kept[part].items():
                if not torch.isfinite(local(tensor)).all():
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
