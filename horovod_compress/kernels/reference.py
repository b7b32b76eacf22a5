"""The kernels as the papers state them, in NumPy. The native ones are tested against these; one name, one meaning, both sides.

All arrays are one-dimensional and contiguous; gradients, residuals and values are float32, indices uint32.
"""
import numpy as np

_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
_MAX_RICE = 31


def accumulate(grad, u, v, momentum, nesterov, scale, k, samples, offset):
    """Adds a gradient to momentum u and velocity v in place and chooses what to send (DGC, arXiv 1712.01887, section 3).

    vanilla: u ← m·u + g, v ← v + u; Nesterov: u ← m·(u + g), v ← v + u + g; without momentum (u None): v ← v + g;
    where g = scale·grad. An element whose new v would not be finite keeps its old u and v. grad is left zero, for the decoded
    sum to be added there.

    Returns (indices, finite): ascending indices of at most k of the largest non-zero |v|, at least 0.8·k where that many
    are not zero; and whether every new v was finite. The native kernel finds its threshold from about `samples` sampled
    elements, the sample shifted by `offset`, and trims what passed; the reference sorts, and needs neither.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        g = np.float32(scale) * grad
        m = np.float32(momentum)
        if u is None:
            new_u, new_v = None, v + g
        elif nesterov:
            new_u = m * (u + g)
            new_v = v + (new_u + g)
        else:
            new_u = m * u + g
            new_v = v + new_u
    finite = np.isfinite(new_v)
    v[...] = np.where(finite, new_v, v)
    if u is not None:
        u[...] = np.where(finite, new_u, u)
    grad.fill(0)
    magnitude = np.abs(v)
    largest = np.argsort(-magnitude, kind="stable")[:k]
    indices = np.sort(largest[magnitude[largest] > 0]).astype(np.uint32)
    return indices, bool(finite.all())


def take(indices, v, u, values, mask):
    """Takes what is sent out of the residual: returns rows of the values sent, rounded to `values` ("fp32", "fp16", "bf16"),
    and, with `mask` and u given, of the u at those places. v keeps the rounding error; masked u becomes 0."""
    sent = _round(v[indices], values)
    v[indices] -= sent
    if not mask or u is None:
        return sent[None]
    taken = np.stack([sent, u[indices]])
    u[indices] = 0
    return taken


def encode_sparse(indices, values, kind):
    """The sparse body (docs/wire-format.md) as uint8: Rice parameter, values, gaps between ascending indices."""
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    costs = [int((gaps >> r).sum()) + len(gaps) * (r + 1) for r in range(_MAX_RICE + 1)]
    r = int(np.argmin(costs))
    bits = []
    for gap in gaps.tolist():
        bits += [1] * (gap >> r) + [0] + [gap >> j & 1 for j in range(r)]
    packed = np.packbits(np.array(bits, np.uint8), bitorder="little")
    head = np.array([r], np.uint8)
    return np.concatenate([head, _store(values, kind).view(np.uint8), packed])


def decode_sparse(body, count, numel, kind):
    """The inverse of encode_sparse: (indices, values). ValueError where the body cannot be `count` entries of a tensor of
    `numel` elements, down to its last bit."""
    if count > numel:
        raise ValueError("more entries than the tensor has elements")
    start = 1 + count * _WIDTH[kind]
    if len(body) < start:
        raise ValueError("shorter than its values")
    r = int(body[0])
    if r > _MAX_RICE:
        raise ValueError("Rice parameter out of range")
    values = _load(body[1:start].tobytes(), kind)
    bits = np.unpackbits(body[start:], bitorder="little").tolist()
    indices = np.empty(count, np.uint32)
    at, index = 0, -1
    try:
        for i in range(count):
            quotient = 0
            while bits[at]:
                quotient += 1
                at += 1
            at += 1
            index += 1 + (quotient << r) + sum(bits[at + j] << j for j in range(r))
            at += r
            if index >= numel:
                raise ValueError("index outside the tensor")
            indices[i] = index
    except IndexError:
        raise ValueError("index bits end too early") from None
    if len(bits) - at >= 8 or any(bits[at:]):
        raise ValueError("longer than its entries")
    return indices, values


def scatter_add(out, indices, values, scale):
    """out[indices] += scale·values, in place; indices do not repeat. Returns whether what stands there now is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[indices] += np.float32(scale) * values
    return bool(np.isfinite(out[indices]).all())


def dense_momentum(out, u, new_u, momentum, nesterov):
    """new_u ← m·u + out, then out ← new_u, or out + m·new_u for Nesterov. Where `out` is not finite everywhere, nothing is
    written. Returns whether it was, and still is, and new_u too."""
    if not np.isfinite(out).all():
        return False
    m = np.float32(momentum)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(m, u, out=new_u)
        new_u += out
        out[...] = out + m * new_u if nesterov else new_u
    return bool(np.isfinite(new_u).all() and np.isfinite(out).all())


def squared_norm(x):
    """Σ x², in float64."""
    x = x.astype(np.float64)
    return float(np.dot(x, x))


def all_finite(x):
    """Whether x holds neither infinity nor NaN."""
    return bool(np.isfinite(x).all())


def _store(values, kind):
    """float32 to the bits on the wire: nearest, ties to even; what is too large becomes the largest finite value."""
    if kind == "fp32":
        return values
    if kind == "fp16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    bits = values.view(np.uint32)
    magnitude = (bits & 0x7FFFFFFF).astype(np.uint64)
    rounded = np.minimum((magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16, 0x7F7F)
    return (bits >> 16 & 0x8000 | rounded.astype(np.uint32)).astype(np.uint16)


def _load(data, kind):
    if kind == "fp32":
        return np.frombuffer(data, "<f4").copy()
    if kind == "fp16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _round(values, kind):
    return values if kind == "fp32" else _load(_store(values, kind).tobytes(), kind)
