"""The optimizers that a compression serves, and the momentum that it has taken over."""

from typing import Any, Callable, Optional, Type

from .optimizer import SGD, options_of


class Serving:
    """The optimizers that a compression serves.

    Attributes:
        bound: the one that it is bound to; where a tape brings gradients, the one that applies
            them.
        is_bound: True once that is known, also where nobody knows it.
        horovods: Horovod's, where gradients come from that.
        cls: the class of optimizers that tell what they apply, and can leave momentum to the
            compression.
        watches: True where backward passes can be seen.
        takes_over: True where an SGD's momentum is taken over.
        lives_on: True where momentum that an SGD has gathered by itself still moves variables,
            though it is taken over.
        factor: returns what Horovod makes of a 1 on each rank; None until that is known.
    """

    def __init__(self) -> None:
        self.bound: Any = None
        self.is_bound = False
        self.horovods: Any = None
        self.cls: Optional[Type] = None
        self.watches = self.takes_over = self.lives_on = False
        self.factor: Callable[[], Any] = lambda: None

    @property
    def stepping(self) -> Any:
        """The one that takes steps; None where it is not known."""
        return self.horovods or self.bound

    def gain(self, takes_over: bool) -> float:
        """The sum that the optimizer's own momentum makes of a result of 1: 1/(1 − m), and 1
        where it is taken over."""
        optimizer = self.stepping
        momentum = (
            float(options_of(optimizer)["momentum"])
            if isinstance(optimizer, SGD) and not takes_over
            else 0.0
        )
        return 1 / (1 - momentum) if momentum < 1 else 1.0

    def check(self, optimizer: Any, elastic: bool) -> None:
        """ValueError where the compression is bound to another optimizer than Horovod's that
        reduces."""
        if optimizer is None or isinstance(optimizer, self.cls or ()):
            return
        if self.takes_over:
            raise ValueError(
                "this compression has taken over the momentum of another optimizer than the one it "
                "serves, which would apply its own besides: "
                "bind it to the optimizer that hvd.DistributedOptimizer gets, and make a new one "
                "for each"
            )
        if elastic and self.cls:
            raise ValueError(
                "this compression is bound to another optimizer than the one it serves, which "
                "would not apply what a rank that is left alone holds "
                "back: bind it to the optimizer that hvd.DistributedOptimizer gets"
            )
