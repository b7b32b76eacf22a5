"""Ranks with different numbers of steps: one that has no more data answers the others' collectives
until all are done. (Not hvd.join(): see `session/join_error.py`.)"""

import contextlib
import io
import itertools
import time
from typing import Any, Iterator, List, Sequence, Tuple

import horovod.torch as hvd
import torch

from ..protocol.handshake import agree
from ..session.step_lifecycle import Event
from . import horovod_internals
from .compression import BoundCompression
from .transport import keep, synchronize
from .unbound import UnboundCompression, compression_of

# Options of a parameter group on which a compression's step depends.
_FOLLOWED = ("lr", "momentum", "nesterov")
# Seconds between two looks at what the other ranks do.
_PAUSE = 5e-4
_UNKNOWN = -float("inf")


@contextlib.contextmanager
def uneven(*trained: Any) -> Iterator[None]:
    """Inside `with uneven(optimizer, model, scheduler):` each rank may take as many steps as it has
    data for.

    A rank that leaves the block takes part in the others' steps, with gradients of zero, until all
    ranks have left it; means stay those over all ranks. What the rank had not sent yet goes out in
    these steps. Then all that was given here continues, on every rank, from the state of a rank
    that trained to the end.

    All ranks enter the block, also one without data. It costs one small allreduce a step, which is
    not waited for. Gradients of backward passes that no step followed are dropped. An exception
    passes through at once, and the rank answers nothing any more. On one rank the block does
    nothing.

    Args:
        *trained: the optimizers that hvd.DistributedOptimizer returned with a compression of this
            package, and what else training changes and is to be alike on all ranks: anything with
            state_dict and load_state_dict. Parameters and a compression's grad_scaler come with the
            optimizer.

    Raises:
        TypeError: what cannot be given.
        RuntimeError: inside another such block.
        MismatchError: ranks give different things.
    """
    found = [(each, compression_of(each)) for each in trained]
    members = [_Member(c._steps.optimizer or each, c) for each, c in found if c is not None]
    _refuse(members, trained)
    if not members[0].steps.session.ranks.active:
        yield
        return
    begun: List[_Member] = []
    with contextlib.ExitStack() as entered:
        for member in members:
            entered.enter_context(member.stepping(trained, begun))
        yield
    for member in members:
        member.leave()
    training = members
    while training:
        training = [member for member in training if member.answer()]
        time.sleep(_PAUSE)
    _continue_alike(members, trained)


class _Member:
    """One optimizer of a block on this rank. What ranks tell each other before each of its steps is
    the maximum over them of: whether one takes the step; whether the last step was discarded; the
    loss scale; and the options of the parameter groups. Ranks that train have these alike."""

    def __init__(self, optimizer: Any, compression: BoundCompression) -> None:
        self.optimizer = optimizer  # Horovod's
        self.compression, self.steps = compression, compression._steps
        self.session, self.ranks = compression._session, compression._ranks
        # Whether this rank has taken part in a step of the others.
        self.answered = False
        self._handle: Any = None

    @contextlib.contextmanager
    def stepping(self, trained: Sequence[Any], begun: "List[_Member]") -> Iterator[None]:
        """Around this rank's own steps. begun: for all of the block, those whose steps have begun
        on this rank, in this order."""
        compression, ranks = self.compression, self.ranks
        compression.handshake()
        self.name = f"{ranks.label()}:uneven.{next(compression._blocks)}"
        agree(
            ranks.transport,
            self.name,
            {"objects given to uneven()": [type(each).__name__ for each in trained]},
            "entered `with uneven(…):`",
            "Give uneven() the same on all ranks",
        )

        def begin() -> None:
            begun[:] = [*(each for each in begun if each is not self), self]
            self.announce(True)

        @torch.compiler.disable
        def before_step(*_: Any) -> None:
            for earlier in itertools.takewhile(lambda each: each is not self, begun):
                earlier.refuse_waiting()

        # Before each step that this rank takes.
        compression._announce = begin
        hook = self.optimizer.register_step_pre_hook(before_step)
        try:
            yield
        finally:
            compression._announce = None
            hook.remove()

    def refuse_waiting(self) -> None:
        """RuntimeError where ranks without data wait for this rank's results to be asked for,
        before they answer steps that have begun later."""
        session = self.session
        if session.compressor.policy.exchange == "split" and session.exchange.under_way:
            raise RuntimeError(
                "an optimizer steps while gradients of another one, which came before, are still "
                "exchanged: with exchange=split, ranks without data would wait forever. Let "
                "optimizers in uneven() step in the order in which their gradients come"
            )

    def announce(self, training: bool) -> None:
        """Tells the others whether this rank takes the step that comes. The answer is for ranks
        that train no more: these do not wait for it."""
        if self._handle is not None:
            synchronize(self._handle)
        session, scaler = self.session, self.steps.grad_scaler
        # On all ranks, now or when the next step begins.
        discarded = (
            not self.answered
            and session.discardable
            and (session.lifecycle.is_unused or not session.exchange.succeeded)
        )
        known = [
            1.0 if scaler is None else scaler.get_scale(),
            *(float(group[key]) for group, key in self._options()),
        ]
        said = [training, discarded, *(known if training else [_UNKNOWN] * len(known))]
        message = torch.tensor(said, dtype=torch.float64, device="cpu")
        self._handle = hvd.allreduce_async_(
            message, name=self.name, op=hvd.Max, process_set=self.ranks.process_set
        )
        keep(self._handle)
        self.ranks.transport.count(message.nbytes, message.nbytes)

    def leave(self) -> None:
        """Brings a step to its end that this rank has begun, and says that it takes no more."""
        if self.session.exchange.under_way:
            self.optimizer.synchronize()
            self.session.lifecycle.take(Event.COMMIT)
        if self.steps.moments:
            # Of backward passes that no step followed.
            for slot in self.steps.slots:
                self.steps.moments.take(slot.name)
        self.announce(False)

    def answer(self) -> bool:
        """Takes part in a step of the others where one comes. Returns whether more may come."""
        if not hvd.poll(self._handle):
            return True
        training, discarded, scale, *options = synchronize(self._handle).tolist()
        self._handle = None
        if discarded:
            self.compression.discard()
        if not training:
            return False
        self.answered = True
        self._follow(scale, options)
        horovod_internals.reduce_zeros(self.optimizer)
        self.session.lifecycle.take(Event.COMMIT)
        self.announce(False)
        return True

    def _options(self) -> List[Tuple[dict, str]]:
        """(parameter group, key) of the options that the others follow."""
        groups = self.optimizer.param_groups
        return [
            (group, key)
            for group in groups
            for key in _FOLLOWED
            if isinstance(group.get(key), (bool, int, float, torch.Tensor))
        ]

    def _follow(self, scale: float, options: Sequence[float]) -> None:
        """Takes over what this rank's own loop would have changed meanwhile, on which state depends
        that is alike on all ranks."""
        scaler = self.steps.grad_scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        for (group, key), value in zip(self._options(), options):
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = bool(value) if isinstance(group[key], bool) else value


def _refuse(members: List[_Member], trained: Sequence[Any]) -> None:
    if not members:
        raise TypeError(
            "uneven() needs the optimizer that hvd.DistributedOptimizer(compression=…) returned, "
            "with a compression of this package. (With an "
            "UpdateOptimizer a rank without data calls optimizer.take_part() where the others "
            "exchange)"
        )
    for each in trained:
        if isinstance(each, (BoundCompression, UnboundCompression)):
            raise TypeError(
                "uneven() takes no compressions: what ranks have not sent yet is each rank's own. "
                "Give it Horovod's optimizer"
            )
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(
                f"uneven() takes what has state_dict and load_state_dict: optimizers, models, "
                f"schedulers; not an object of {type(each)}"
            )
    if any(member.compression._announce is not None for member in members):
        raise RuntimeError("this optimizer is inside `with uneven(…):` already")
    if len({member.ranks.process_set.process_set_id for member in members}) > 1:
        raise TypeError("uneven() takes optimizers of one process set: make a block for each")


def _continue_alike(members: List[_Member], trained: Sequence[Any]) -> None:
    """Where some rank has answered steps of the others, brings all ranks to the state of the first
    that trained to the end."""
    name, process_set = members[0].name, members[0].ranks.process_set
    answered = any(member.answered for member in members)
    place = 0 if answered else hvd.size() - hvd.rank()
    found = torch.tensor([place, answered], dtype=torch.int64, device="cpu")
    last, some_answered = hvd.allreduce(
        found, name=f"{name}.last", op=hvd.Max, process_set=process_set
    ).tolist()
    if not some_answered:
        return
    root = hvd.size() - last
    params = [
        p.detach()
        for member in members
        for group in member.optimizer.param_groups
        for p in group["params"]
    ]
    for handle in [
        hvd.broadcast_async_(p, root, f"{name}.{i}", process_set) for i, p in enumerate(params)
    ]:
        synchronize(handle)
    scalers = (member.steps.grad_scaler for member in members)
    restored = [*trained, *(scaler for scaler in scalers if scaler is not None)]
    states = io.BytesIO()
    if hvd.rank() == root:
        torch.save([each.state_dict() for each in restored], states)
    states = io.BytesIO(
        hvd.broadcast_object(states.getvalue(), root, f"{name}.states", process_set)
    )
    if answered:
        for each, state in zip(
            restored, torch.load(states, map_location="cpu", weights_only=False)
        ):
            _load(each, state)
        for member in members:
            member.optimizer.zero_grad()


def _load(trained: Any, state: Any) -> None:
    """Loads a state. An optimizer's parameter groups stay the same objects: schedulers, and the
    optimizer that was wrapped, have them too."""
    groups = getattr(trained, "param_groups", None)
    trained.load_state_dict(state)
    if groups is not None:
        for group, loaded in zip(groups, trained.param_groups):
            group.update(loaded)
        trained.param_groups = groups
