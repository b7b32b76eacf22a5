"""AdamW for ranks that see a part of each batch."""

from typing import Any, Callable, ClassVar, Dict, Iterable, Optional, Tuple

import torch

from ..session.updates import AVERAGED, check_ranks
from .optimizers import own_class

# Steps in which gradients may still have been zero, as those with which
# hvd.broadcast_optimizer_state makes states.
_FIRST = 10


class AdamWOfRanks(torch.optim.Optimizer):
    """AdamW whose steps are as large on a rank's part of each batch as on the whole of it, for
    `UpdateOptimizer`.

        optimizer = AdamW(model.parameters(), lr=1e-3)
        spec = "adacomp:bin_length=64,dense=fp16"
        optimizer = UpdateOptimizer(optimizer, compression=spec, every=2)

    Adam divides by the root of the mean squared gradient. That of a rank's part of the batch has N
    times the whole batch's noise, N being the number of ranks, so where noise is more than signal a
    rank alone takes steps that are up to √N times too small. Here q estimates the squared signal:
    the noise of a gradient g and that of the mean m̂ of the gradients before it have nothing to do
    with each other, so that g·m̂ is on average the signal's square. What the square has above that
    is noise, and counts by an N-th:

        v ← β₂·v + (1 − β₂)·g²
        q ← β₂·q + (1 − β₂)·g·m̂,  and v at the first gradient
        m ← β₁·m + (1 − β₁)·g,  m̂ = m/(1 − β₁ᵗ)
        p ← p − lr·λ·p − lr·m̂/(√((v/N + (1 − 1/N)·max(q, 0))/(1 − β₂ᵗ)) + ε)

    With N = 1 it is torch's AdamW. v, m, the bias corrections and the decoupled weight decay λ are
    those of arXiv 1412.6980 and 1711.05101; q is our own. A gradient whose sign turns within some
    1/(1 − β₁) steps, as in steep directions at a high learning rate, counts as noise.

    Another 4 bytes an element than AdamW are kept. A state of torch's AdamW can be loaded: with it
    q begins as v. All arguments may differ between parameter groups.

    Args:
        params: as of torch.optim.AdamW.
        lr: as of torch.optim.AdamW.
        betas: as of torch.optim.AdamW.
        eps: as of torch.optim.AdamW.
        weight_decay: as of torch.optim.AdamW; with 0 it is Adam.
        ranks: N, on how many ranks' samples each exchange's mean rests; default: all, at each step.

    Raises:
        ValueError: what is out of range, or under hvd.DistributedOptimizer.
        RuntimeError: sparse gradients.
    """

    # What users import it as.
    _known_as: str
    # Finds the number of all ranks.
    _size: ClassVar[Callable[[], int]]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        ranks: Optional[int] = None,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "ranks": ranks},
        )

    def __setstate__(self, state: Dict[str, Any]) -> None:
        for group, own in zip(state.get("param_groups", ()), getattr(self, "param_groups", ())):
            group.setdefault("ranks", own["ranks"])  # torch's have none
        super().__setstate__(state)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As of torch's optimizers. Raises ValueError."""
        lr, betas, eps, weight_decay, ranks = (
            {**self.defaults, **param_group}[key]
            for key in ("lr", "betas", "eps", "weight_decay", "ranks")
        )
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
            raise ValueError(
                f"lr, eps and weight_decay must be at least 0, not {lr}, {eps} and {weight_decay}"
            )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas}")
        check_ranks(ranks)
        super().add_param_group(param_group)

    # torch declares it once for each kind of closure.
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step with this rank's gradients."""
        if own_class(self) is not type(self):
            raise ValueError(AVERAGED)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            share = 1 / (group["ranks"] or type(self)._size())
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, share, group)
        return loss

    def _update(
        self, param: torch.Tensor, grad: torch.Tensor, share: float, group: Dict[str, Any]
    ) -> None:
        """share: of noise in the square, 1/N."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        if grad.is_sparse:
            raise RuntimeError(
                f"{self._known_as} cannot have sparse gradients: make the embedding with "
                "sparse=False"
            )
        state = self.state[param]
        # Not where torch's state was loaded.
        known = "exp_signal_sq" in state
        for key in ("exp_avg", "exp_avg_sq", "exp_signal_sq"):
            if key not in state:
                state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        mean, square, signal = state["exp_avg"], state["exp_avg_sq"], state["exp_signal_sq"]
        before = state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu")).item()
        state["step"] += 1
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if known and (before > _FIRST or signal.any()):
            signal.mul_(beta2).addcmul_(grad, mean, value=(1 - beta2) / (1 - beta1**before))
        else:
            signal.copy_(square)
        mean.lerp_(grad, 1 - beta1)
        root = (
            signal.clamp(min=0)
            .mul_(1 - share)
            .add_(square, alpha=share)
            .sqrt_()
            .div_((1 - beta2 ** (before + 1)) ** 0.5)
            .add_(group["eps"])
        )
        param.mul_(1 - lr * group["weight_decay"]).addcdiv_(
            mean, root, value=-lr / (1 - beta1 ** (before + 1))
        )
