"""A communication hook of DistributedDataParallel, over the exchange."""

import functools
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compressors import get_compressor
from ..session.auto import Auto
from ..session.callers import callers
from ..session.notices import warn_once
from ..session.step_lifecycle import Event
from ..torch_common.backward import in_backward, pass_under_way
from ..torch_common.optimizers import without_wrappers
from ..torch_common.parameters import Slot, named, tensor_of
from ..torch_common.search import has_others
from ..torch_common.steps import check_types
from ..torch_distributed.checks import OTHER_OPTIMIZER, check_optimizer
from ..torch_distributed.compression import GroupCompression
from ..torch_distributed.ranks import GroupRanks
from .checks import check_model, check_step

_UNUSED = (
    "no optimizer.step() has used the results of the last backward(). Where gradients add up over "
    "several passes, run all but the last in `with model.no_sync():`; where a step is left out, "
    "call compression.discard() before zero_grad(), which needs discardable=True"
)
_INTERRUPTED = (
    "a backward pass has ended before all gradients were exchanged, so this step would use some "
    "that ranks do not share. DistributedDataParallel does not go on after that: on all ranks wrap "
    "the module in a new DistributedDataParallel, once the old one is gone, and load what "
    "compression.state_dict() returns into its compression"
)

_OF_ONE_RANK = (
    "accelerate's save_state() writes a state of rank 0 alone, and this one is each rank's own: no "
    "other rank can load it. Register what saves state_dict(portable=True); see "
    "docs/guides/save-and-resume.md"
)


class _Sent(NamedTuple):
    """A gradient that is under way. view: its part of DDP's bucket; memory: where the result will
    be; carrier: what the exchange has returned, and wait, where that is added up over ranks, waits
    for it."""

    slot: Slot
    view: torch.Tensor
    memory: torch.Tensor
    carrier: Any
    wait: Optional[Callable[[], None]]


class _Bucket(NamedTuple):
    """A bucket of DDP's. gradients: its parameters, and their parts of the buffer."""

    buffer: torch.Tensor
    gradients: List[Tuple[torch.Tensor, torch.Tensor]]


class DDPCompression(GroupCompression):
    """A compression of the gradients of a DistributedDataParallel model.

    Args:
        spec: as for `horovod_compress.get_compressor`.
        model: the wrapped model, with no communication hook yet.
        optimizer: the torch optimizer that steps its parameters. An SGD's momentum, Nesterov and
            weight decay are taken over by algorithms that correct momentum (dgc). None where the
            algorithm needs nothing from it.
        grad_scaler: the torch.amp.GradScaler that scales the loss, where there is one: what is kept
            of gradients then follows its scale, and steps that it skips are forgotten. Implies
            discardable.
        discardable: `discard()` forgets a step, as if it had never been. Takes as much memory again
            as the algorithm's state, and the time to copy that in each step.

    Its residuals are this rank's own: save `state_dict()` on every rank, or one that is portable.

    Raises:
        ValueError: bad options, or a model that cannot be served.
        MismatchError: at the first gradient, on all ranks: they were started differently.
    """

    def __init__(
        self,
        spec: Any,
        model: DistributedDataParallel,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        if not isinstance(spec, Auto):
            get_compressor(spec)
        check_model(model)
        check_types(optimizer, grad_scaler)
        if optimizer is not None:
            optimizer = without_wrappers(optimizer)
            check_optimizer(model.module, optimizer, "ddp.compress")
        ranks = GroupRanks(model.process_group)
        trained = [
            (name, param)
            for name, param in model.module.named_parameters()
            if param.requires_grad and name not in model.parameters_to_ignore
        ]
        pairs = named(None, trained)
        super().__init__(ranks, spec, optimizer, pairs, grad_scaler, discardable)
        self._model = weakref.ref(model)
        self._by_parameter = {id(slot.param): slot for slot in self._steps.slots}
        # Whether a backward pass has begun to exchange, and not come to its end.
        self._interrupted = False
        self._sent: List[_Sent] = []
        # Of this step's buckets: their futures, and what those will hold.
        self._futures: List[Tuple[torch.futures.Future, torch.Tensor]] = []
        # Of those: what waits for the last bucket. Then it is known which parameters take part.
        self._held: List[_Bucket] = []
        # Parameters that backward passes have reached since the last exchange. None where DDP
        # expects all to be reached.
        self._reached: Optional[Set[int]] = None
        # Where a model was wrapped anew, that of before does nothing more around steps.
        for other in list(_serving):
            if other._by_parameter.keys() & self._by_parameter.keys():
                if other._interrupted:
                    other._drop_interrupted()
                other._steps.hooks.close()
        _serving.add(self)
        if optimizer is not None and self._ranks.active:
            self._steps.register(optimizer, self)
        if model.find_unused_parameters or model.static_graph:
            reached = self._reached = set()
            for slot in self._steps.slots:
                slot.param.register_post_accumulate_grad_hook(lambda param: reached.add(id(param)))

    # -- DDP's interface

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Called by DDP with each bucket of gradients, in the same order on all ranks. Returns the
        future of its mean, which is there when the last bucket is."""
        buffer = bucket.buffer()
        future: torch.futures.Future = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        if not self._ranks.active:
            future.set_result(buffer)
            return future
        try:
            if bucket.index() == 0:
                self._interrupted = True
                self._drop_interrupted()
                check_step(self._model())
                self._steps.begin()
                # Now, because what users ask must not end a step from here on.
                self._session.exchange.end_step()
                self._session.exchange.within = pass_under_way()
            self._futures.append((future, buffer))
            self._held.append(_Bucket(buffer, list(zip(bucket.parameters(), bucket.gradients()))))
            if bucket.is_last() or not self._leaves_out:
                self._submit_held()
            if bucket.is_last():
                self._finish()
                self._interrupted, self._session.exchange.within = False, bool
        except BaseException:
            self._session.exchange.within, model = bool, self._model()
            if model is not None:
                # Else DDP says in the next forward pass that it has an error.
                model.register_forward_pre_hook(_refuse_after_failure)
            raise
        return future

    @property
    def _leaves_out(self) -> bool:
        """True where parameters that no rank has used take no part in a step."""
        return self._reached is not None and self._session.exchange.tensors.keep_state

    def serves(self, param: torch.Tensor) -> bool:
        """Returns whether this is the compression of a parameter, of a model that is still
        there."""
        return id(param) in self._by_parameter and self._model() is not None

    def _drop_interrupted(self) -> None:
        super()._drop_interrupted()
        self._sent.clear()
        self._futures.clear()
        self._held.clear()

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """As of `Bound`. After a backward pass that has failed, without its step."""
        saved_by = (frame.f_code.co_name for frame in callers())
        if self._ranks.active and not portable and "save_custom_state" in saved_by:
            warn_once(_OF_ONE_RANK)
        return super().state_dict(portable)

    def _submit_held(self) -> None:
        used = None
        if self._leaves_out:
            reached = self._reached or ()
            here = [id(slot.param) in reached for slot in self._steps.slots]
            used = {id(slot.param) for slot in self._used_by_any(here)}
        held, self._held = self._held, []
        for bucket in held:
            self._submit_bucket(bucket, used)
        self._ranks.beside.send()

    def _submit_bucket(self, bucket: "_Bucket", used: Optional[Set[int]]) -> None:
        """used: ids of the parameters that take part; None for all."""
        sent, whole = [], True
        for param, flat_view in bucket.gradients:
            slot = self._by_parameter.get(id(param))
            if slot is None:
                raise ValueError(
                    "a gradient came of a parameter that was frozen, or not there, when the "
                    "compression was made: make it after the model is as it will be trained"
                )
            if used is not None and id(param) not in used:
                continue
            view = _as_parameter(flat_view, param)
            memory, array, carrier = self._steps.submit(slot, view)
            whole = whole and carrier is array and memory is view
            sent.append(_Sent(slot, view, memory, carrier, None))
        # As DDP itself would do it.
        together = self._ranks.mean(bucket.buffer) if whole and sent else None
        for each in sent:
            wait = together
            # What goes in place of a gradient, where that is not gathered.
            if not wait and self._session.exchange.tensors.is_payload(each.slot.name, each.carrier):
                wait = self._ranks.mean(tensor_of(each.carrier))
            self._sent.append(each._replace(wait=wait))

    def _finish(self) -> None:
        """Brings all results, after the last bucket."""
        exchange, lifecycle = self._session.exchange, self._session.lifecycle
        self._steps.streams.join()
        exchange.flush()
        for each in self._sent:
            if each.wait is not None:
                each.wait()
            exchange.finish(each.slot.name, each.carrier, now=False)
        for each in self._sent:
            if each.memory is not each.view:
                self._steps.copy_result(each.memory, each.view)
        if self._steps.must_be_skipped():
            for _, buffer in self._futures:
                buffer.fill_(float("nan"))
        self._steps.note_results((each.slot, each.view) for each in self._sent)
        lifecycle.take(Event.ARRIVE)
        # A rank that has joined takes part in the others' steps, outside of a backward pass.
        if self._steps.optimizer is None or not in_backward():
            lifecycle.take(Event.COMMIT)
        if self._reached is not None:
            self._reached.clear()
        futures, self._futures = self._futures, []
        self._sent.clear()
        for future, buffer in futures:
            future.set_result(buffer)

    # -- around steps of the optimizer

    def before_use(self, optimizer: Any, in_closure: bool) -> None:
        if self._interrupted:
            raise RuntimeError(_INTERRUPTED)

    def before_unused(self) -> None:
        session = self._session
        if session.exchange.succeeded:
            # Whether gradients were zeroed since is not known: they may add up.
            if not self._steps.was_skipped() and (
                session.discardable or session.compressor.policy.m
            ):
                renew = "wrap the module in a new DistributedDataParallel"
                other = OTHER_OPTIMIZER.format(entry="ddp.compress", renew=renew)
                raise RuntimeError(other if self._has_others else _UNUSED)
            if not session.discardable and self._has_others:
                # It has used them.
                session.lifecycle.take(Event.COMMIT)

    # Looked for once, because that takes long.
    @functools.cached_property
    def _has_others(self) -> bool:
        """True where another optimizer than the given one has parameters of this model."""
        model = self._model()
        return model is not None and has_others(model.module, self._steps.bound_optimizer)


_serving: "weakref.WeakSet[DDPCompression]" = weakref.WeakSet()


def _refuse_after_failure(*_: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(_INTERRUPTED)


# DDP looks at these annotations.
def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.exchange(bucket)


def _as_parameter(view: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A contiguous part of a bucket in the order of the parameter's elements, which it has in
    memory where that is dense."""
    if param.is_contiguous() or torch.empty_like(param, device="meta").stride() != param.stride():
        return view
    return view.as_strided(param.size(), param.stride())
