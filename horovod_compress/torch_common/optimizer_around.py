"""Optimizers that have another one inside, which moves this rank's parameters, and exchange
parameters themselves. Methods of the inner one that may change parameters outside of its step, such
as train() and eval() of schedule-free optimizers, are told of, so that ranks can be kept alike."""

import contextlib
import functools
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
)

import torch

from ..session.notices import warn_once
from ..session.updates import methods_of
from .optimizers import own_class

# PyTorch's own: each of their ranks steps some of the parameters only, or averages them.
_EXCHANGING = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
# Elements of a tensor that are looked at.
_PROBED = 64
Around = ContextManager[None]


class OptimizerAround(torch.optim.Optimizer):
    """An optimizer around another one, `_optimizer`, whose parameter groups, state and methods are
    this one's too."""

    # A GradScaler then calls step() on every rank, whatever it has found, and says so.
    _step_supports_amp_scaling = True
    # Whether the optimizer itself is at work.
    _inside = False
    # Comes before each step and exchange. RuntimeError where they cannot be now.
    _begin: Callable[[], None]
    # Exchanges what local steps have added.
    _exchange: Callable[[], None]
    # What is said where its state is broadcast.
    _broadcast_in_vain: Optional[str] = None

    # The optimizer's own, also after that has loaded others.
    param_groups = property(lambda self: self._optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self._optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self._optimizer.defaults)  # type: ignore[assignment]

    def _surround(
        self, optimizer: torch.optim.Optimizer, every: int, params: Iterable[torch.Tensor]
    ) -> None:
        """In place of torch's __init__, which would make parameter groups of its own.

        Args:
            optimizer: the one inside.
            every: how many local steps come before each exchange.
            params: those that are exchanged.
        """
        self._optimizer, self._every = optimizer, every
        self._known = {id(param) for param in params}
        # Since the last exchange.
        self.local_steps = 0
        # Makes hooks, and step() that calls them.
        self.__setstate__({})

    def __getattr__(self, name: str) -> Any:
        """The optimizer's own methods beside those of every optimizer, such as train() and
        eval()."""
        if name.startswith("_") and name not in self.__dict__.get("_methods", ()):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self._optimizer, name)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} is part of an exchange of ranks, and cannot be copied or "
            "pickled: save its state_dict()"
        )

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Raises ValueError."""
        raise ValueError(
            f"parameters cannot be added to {type(self).__name__}: add them to the optimizer before"
        )

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """Makes the optimizer's state, and leaves parameters as they are: what
        hvd.broadcast_optimizer_state calls on ranks whose optimizer has no state yet, and in which
        no other rank takes part."""
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        try:
            with self._at_work():
                self._optimizer.step()
        finally:
            for param, values in zip(params, before):
                param.copy_(values)
        if self._broadcast_in_vain:
            warn_once(self._broadcast_in_vain)

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    @torch.no_grad()
    def _take_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        """A step of the optimizer on this rank, and after every so many of them the exchange."""
        self._begin()
        loss = self._local_step(closure)
        self.local_steps += 1
        if self.local_steps >= self._every:
            self._exchange()
        return loss

    @torch.compiler.disable
    @torch.no_grad()
    def take_part(self) -> None:
        """Exchanges now, with what local steps have added so far, or with nothing. Call it on a
        rank that has no data left, or is behind, when the other ranks end a round. All ranks must
        exchange equally often."""
        self._begin()
        self._exchange()

    def _refuse_unknown(self) -> None:
        """ValueError where the optimizer has got parameters that are not exchanged."""
        unknown = [
            i
            for i, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.requires_grad and id(p) not in self._known
        ]
        if unknown:
            name = type(self).__name__
            raise ValueError(
                f"parameter group {unknown[0]} has parameters that came, or were frozen, when this "
                f"{name} was made: make a new one for them"
            )

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
        with self._at_work():
            if closure is None:
                return self._optimizer.step()
            # Gradients are off around this.
            return self._optimizer.step(torch.enable_grad()(closure))


def check_inner(optimizer: Any, name: str) -> None:
    """Raises TypeError for what is no optimizer, ValueError for one that cannot be inside.

    Args:
        optimizer: what a user gave.
        name: of the optimizer around it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{name} needs a torch optimizer, not an object of {type(optimizer)}: "
            "give it the optimizer that has the parameters, and put what is none around the "
            f"{name}"
        )
    names = [each.__name__ for each in type(optimizer).__mro__]
    if (
        isinstance(optimizer, OptimizerAround)
        or own_class(optimizer) is not type(optimizer)
        or not _EXCHANGING.isdisjoint(names)
    ):
        raise ValueError(
            f"{type(optimizer).__name__} exchanges already: give {name} the optimizer itself"
        )
    # It takes parameters to be where its last step has left them.
    kin = next((each for each in names if "lbfgs" in each.lower()), None)
    if kin is not None:
        raise ValueError(
            f"{kin} learns curvature from how far its own last step went and how the gradient has "
            "changed since. Here parameters go where the mean of all ranks' steps takes them, so "
            f"the two do not belong together, and it diverges: give {name} an optimizer "
            "that does not look back at its own steps, such as SGD or AdamW"
        )


def check_one_state(state_dict: Any, name: str) -> None:
    """Raises TypeError for what is no state, such as the list of all ranks' that a compression
    takes.

    Args:
        state_dict: what a user has given.
        name: of the optimizer around another one.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(
            f"{name} loads one state, not an object of {type(state_dict)}: what this rank has "
            "saved, or for another number of ranks what state_dict(portable=True) has returned"
        )


def watch(optimizer: torch.optim.Optimizer, around: Callable[[str], Around]) -> Set[str]:
    """Has the methods that others than PyTorch have given this optimizer run within `around(name)`,
    whoever calls them. Where one returns a context manager, entering and leaving that do, too.
    Returns their names."""
    names = methods_of(type(optimizer), dir(torch.optim.Optimizer), ("torch",))
    for name in names:
        setattr(optimizer, name, _within(getattr(optimizer, name), functools.partial(around, name)))
    return names


def _within(method: Callable[..., Any], around: Callable[[], Around]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        with around():
            result = method(*args, **keywords)
        managing = isinstance(result, contextlib.AbstractContextManager)
        return _managed(result, around) if managing else result

    return call


@contextlib.contextmanager
def _managed(manager: ContextManager[Any], around: Callable[[], Around]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        with around():
            entered = manager.__enter__()

        def leave(*error: Any) -> Any:
            with around():
                return manager.__exit__(*error)

        stack.push(leave)
        yield entered


class Probe:
    """Tells whether tensors were changed in between, in little time: by PyTorch's own count of
    changes, which does not see those through `tensor.data`, and some of the elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._versions = [each._version for each in tensors]
        some: Dict[torch.device, List[torch.Tensor]] = {}
        for each in tensors:
            some.setdefault(each.device, []).append(_some_of(each.detach()))
        self._some = {device: torch.cat(those) for device, those in some.items()}

    def differs(self, other: "Probe") -> bool:
        """Returns whether the same tensors, probed at another time, were changed in between."""
        if self._versions != other._versions or self._some.keys() != other._some.keys():
            return True
        return any(not torch.equal(its, other._some[device]) for device, its in self._some.items())


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes, of which those of a NaN are equal."""
    step = max(1, tensor.numel() // _PROBED)
    size = (tensor.numel() + step - 1) // step
    return torch.as_strided(tensor, (size,), (step,)).contiguous().view(torch.uint8)
