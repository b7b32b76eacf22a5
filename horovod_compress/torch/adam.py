"""AdamW for ranks that see a part of each batch."""
from typing import Any, Callable, Iterable, Optional, Tuple

import horovod.torch as hvd
import torch

from ..updates import check_ranks


class AdamW(torch.optim.Optimizer):
    """AdamW whose steps are as large on a rank's part of each batch as on the whole of it, for `UpdateOptimizer`.

        optimizer = hvdc.AdamW(model.parameters(), lr=1e-3)
        optimizer = hvdc.UpdateOptimizer(optimizer, model.named_parameters(), "adacomp:bin_length=100,dense=fp16", every=4)

    Adam divides by the root of the mean squared gradient. That of a rank's part of the batch has N times the whole batch's noise, N being the number
    of ranks, so where noise is more than signal a rank alone takes steps that are up to √N times too small. Here q estimates the squared signal:
    the noise of a gradient g and that of the mean m̂ of the gradients before it have nothing to do with each other, so that g·m̂ is on average the
    signal's square. What the square has above that is noise, and counts by an N-th:

        q ← β₂·q + (1 − β₂)·g·m̂,  m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²          (the first step's q with g², as it has no m̂)
        w = (v/N + (1 − 1/N)·max(q, 0)) / (1 − β₂ᵗ)
        p ← p − lr·λ·p − lr·m̂/(√w + ε),  m̂ = m/(1 − β₁ᵗ)

    With N = 1 it is torch's AdamW. v, m, the bias corrections and the decoupled weight decay λ are those of arXiv 1412.6980 and 1711.05101; q and w
    are our own.

    params, lr, betas, eps, weight_decay: as of torch.optim.AdamW; with a weight_decay of 0 it is Adam. ranks: N, on how many ranks' samples each
    exchange's mean rests; default: hvd.size() at each step. Another 4 bytes an element than AdamW are kept.

    Raises ValueError for what is out of range, and RuntimeError for sparse gradients.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
        ranks: Optional[int] = None,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
            raise ValueError(f"lr, eps and weight_decay must be at least 0, not {lr}, {eps} and {weight_decay}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas}")
        check_ranks(ranks)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "ranks": ranks})

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step with this rank's gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "ranks")})
        return loss

    def _update(self, param: torch.Tensor, lr: Any, betas: Tuple[float, float], eps: float, weight_decay: float, ranks: Optional[int]) -> None:
        grad, (beta1, beta2) = param.grad, betas
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("hvdc.AdamW cannot have sparse gradients: make the embedding with sparse=False")
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state.update({key: torch.zeros_like(param, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq", "exp_signal_sq")})
        mean, square, signal = state["exp_avg"], state["exp_avg_sq"], state["exp_signal_sq"]
        before = 1 - beta1 ** state["step"].item()
        state["step"] += 1
        steps = state["step"].item()
        signal.mul_(beta2).addcmul_(grad, mean if steps > 1 else grad, value=(1 - beta2) / (before or 1))
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        share = 1 / (ranks or hvd.size()) / (1 - beta2 ** steps)
        root = signal.clamp(min=0).mul_(1 / (1 - beta2 ** steps) - share).add_(square, alpha=share).sqrt_().add_(eps)
        param.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - beta1 ** steps))
