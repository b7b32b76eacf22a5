"""Adaptive selections: element by element, or bin by bin, from the values of the residual.

Each adds the gradient to the residual, selects elements, encodes the selection as a sparse body,
and subtracts the decoded values from the residual; AdaComp subtracts them in the next call. Where
the gradient is not finite everywhere nothing is selected.
"""

from typing import Optional

import numpy as np

from ..encoded import Encoded
from .dense import TOO_LARGE, Float, advance
from .sparse import code_entries, encode_sparse


def encode_strom(grad: np.ndarray, residual: np.ndarray, *, tau: float) -> Encoded:
    """Threshold quantization (Strom, Interspeech 2015): r ← r + g; where |r| > tau, sign(r)·tau is
    sent and subtracted from r.

    grad is left zero; an element whose new r would be TOO_LARGE or NaN keeps its old one, and then
    nothing is sent.
    """
    finite = advance(residual, residual + grad)
    grad.fill(0)
    indices = np.flatnonzero((np.abs(residual) > np.float32(tau)) & finite).astype(np.uint32)
    values = np.copysign(np.float32(tau), residual[indices])
    residual[indices] -= values
    return encode_sparse(indices, values, kind="sign", scales=(tau,))._replace(finite=finite)


def encode_variance(
    grad: np.ndarray,
    squares: Optional[np.ndarray],
    r: np.ndarray,
    v: np.ndarray,
    spare: Optional[np.ndarray] = None,
    *,
    alpha: Float,
    zeta: Float,
    tau: Float,
    error_feedback: bool,
) -> Encoded:
    """Variance-based compression (Tsuzuku et al., ICLR 2018 workshop).

    r ← r + g, v ← v + squares (squares None: g²). Where r² > alpha·v and |r| > tau the element is
    sent, elsewhere v ← zeta·v. grad is left zero; an element whose new r would be TOO_LARGE or NaN,
    or v infinite, keeps its old ones.

    tau 0: r is rounded to a power of two, the largest ones down, and sent with a sign and a 3-bit
    exponent below the largest's. An element that would need more bits keeps r and v. Else v ← 0,
    and r ← 0, or the rounding error with error_feedback. tau above 0 (Strom hybrid): sign(r)·tau is
    sent, r ← r − sign(r)·tau, v ← max(v − 2|r|tau + tau², 0).

    undo: (indices, rows of r and v there before the subtraction). spare: indices of an earlier
    step. The native function reuses their memory, and that of the rows returned with them, where it
    is large enough.
    """
    alpha, zeta, tau = np.float32(alpha), np.float32(zeta), np.float32(tau)
    new_r, new_v = r + grad, v + (grad * grad if squares is None else squares)
    good = (np.abs(new_r) < TOO_LARGE) & np.isfinite(new_v)
    r[...], v[...] = np.where(good, new_r, r), np.where(good, new_v, v)
    fires = (r * r > alpha * v) & (np.abs(r) > tau)
    v[...] = np.where(fires, v, zeta * v)
    grad.fill(0)
    finite = bool(good.all())
    indices = np.flatnonzero(fires & finite).astype(np.uint32)
    if tau == 0:
        kind, (indices, values, scales) = "power", code_entries(indices, r, "power")
        left = np.zeros_like(values)
    else:
        kind, values, scales = "sign", np.copysign(tau, r[indices]), [tau]
        left = np.maximum(v[indices] - 2 * np.abs(r[indices]) * tau + tau * tau, 0)
    before = np.stack([r[indices], v[indices]])
    v[indices] = left
    r[indices] = r[indices] - values if tau > 0 or error_feedback else 0
    return encode_sparse(indices, values, kind=kind, scales=scales)._replace(
        finite=finite, undo=(indices, before)
    )


def encode_adacomp(
    grad: np.ndarray,
    residual: np.ndarray,
    sent: np.ndarray,
    *,
    sent_scale: float,
    bin_length: int,
    scale_factor: float,
) -> Encoded:
    """AdaComp (Chen et al., AAAI 2018): G = residual + g, H = residual + scale_factor·g; in each
    bin of bin_length elements those with |H| ≥ max |G| are sent, as sign(G) times scale, the mean
    of all bins' maxima.

    The selection stays in the residual until the next call, which first subtracts
    sign(residual)·sent_scale at the ascending indices `sent`. grad is left zero; an element whose
    new G would be TOO_LARGE or NaN keeps its old residual, and then nothing is sent. An element
    with G = 0 is not sent. undo: (indices of the selection, scale), which are `sent` and
    `sent_scale` of the next call.
    """
    if len(sent) and sent.max() >= len(residual):
        raise ValueError("index outside the tensor")
    residual[sent] -= np.copysign(np.float32(sent_scale), residual[sent])
    finite = advance(residual, residual + grad)
    bin_length = min(bin_length, max(len(grad), 1))
    bins = np.arange(len(grad)) // bin_length
    gmax = np.zeros(-(-len(grad) // bin_length), np.float32)
    np.maximum.at(gmax, bins, np.abs(residual))
    h = residual + np.float32(scale_factor - 1) * grad
    grad.fill(0)
    scale = np.float32(gmax.sum(dtype=np.float64) / max(len(gmax), 1))
    selected = (np.abs(h) >= gmax[bins]) & (residual != 0)
    indices = np.flatnonzero(selected & bool(finite and scale)).astype(np.uint32)
    encoded = encode_sparse(
        indices, np.copysign(scale, residual[indices]), kind="sign", scales=(scale,)
    )
    return encoded._replace(finite=finite, undo=(indices, float(scale)))
