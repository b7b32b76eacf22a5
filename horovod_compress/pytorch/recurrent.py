"""LSTM, GRU and RNN layers whose backward pass can see the samples apart, which torch's own, fused
ones do not let anyone: `torch.lstm`, `torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu` and their
cells."""

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_sigmoid_back = torch.ops.aten.sigmoid_backward.grad_input
_tanh_back = torch.ops.aten.tanh_backward.grad_input

Tensors = Sequence[Tensor]
Gradient = Callable[..., Tensor]  # see FUNCTIONS


class _Run(NamedTuple):
    """What a layer runs with, over time in one direction. Samples are sorted by length: at time t
    the first sizes[t] of them are there, and the states of the others stay as they are."""

    state: Tensors
    # Of the input, the hidden state, their biases, and the projection: None for those that a layer
    # lacks.
    weights: Sequence[Any]
    sizes: List[int]
    order: range


class _Cell(NamedTuple):
    """A kind of cell, with so many states: two functions over time, on arrays (time, batch, …).

    forward: (x, run) -> (out, last states, what backward needs). backward: (out, that, gradients of
    out and of the last states, run) -> (δ of what the input's weights gave, δ of the hidden
    state's, gradients of the first states, (input, δ) of the projection or None).
    """

    states: int
    forward: Callable[[Tensor, _Run], Tuple[Tensor, Tensors, Tensors]]
    backward: Callable[
        [Tensor, Tensors, Tensor, Tensors, _Run],
        Tuple[Tensor, Tensor, Tensors, Optional[Tensors]],
    ]


def _previous(states: Tensor, first: Tensor, order: range) -> Tensor:
    """What a state, kept for each time, was before that."""
    return torch.cat((first[None], states[:-1]) if order.step > 0 else (states[1:], first[None]))


def _carry(states: Tensor, t: int, n: int, before: Tensor) -> Tensor:
    """The states at time t, where the first n samples are there, and the others keep what was
    before."""
    if n < len(before):
        states[t, n:] = before[n:]
    return states[t]


def _lstm(x: Tensor, run: _Run) -> Any:
    (h, c), (w_ih, w_hh, b_ih, b_hh, w_hr), sizes, order = run
    gates = F.linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
    out, cells = h.new_empty(len(x), *h.shape), c.new_empty(len(x), *c.shape)
    for t in order:
        n = sizes[t]
        i, f, g, o = gates[t, :n].addmm_(h[:n], w_hh.T).chunk(4, 1)
        gates[t, :n, : 2 * c.shape[1]].sigmoid_()
        g.tanh_(), o.sigmoid_()
        torch.mul(f, c[:n], out=cells[t, :n]).addcmul_(i, g)
        c = _carry(cells, t, n, c)
        hidden = o * c[:n].tanh()
        out[t, :n] = hidden if w_hr is None else hidden @ w_hr.T
        h = _carry(out, t, n, h)
    return out, (h, c), (gates, cells)


def _lstm_back(out: Tensor, kept: Tensors, d_out: Tensor, d_last: Tensors, run: _Run) -> Any:
    (gates, cells), (dh, dc), ((_, first), (_, w_hh, *_, w_hr), sizes, order) = (
        kept,
        d_last,
        run,
    )
    before = _previous(cells, first, order)
    delta = torch.zeros_like(gates) if sizes[-1] < sizes[0] else torch.empty_like(gates)
    projection = [] if w_hr is None else [torch.zeros_like(cells), torch.zeros_like(out)]
    for t in reversed(order):
        n = sizes[t]
        i, f, g, o = gates[t, :n].chunk(4, 1)
        di, df, dg, do = delta[t, :n].chunk(4, 1)
        squashed = cells[t, :n].tanh()
        back = dh[:n] + d_out[t, :n]
        if w_hr is not None:
            torch.mul(o, squashed, out=projection[0][t, :n])
            projection[1][t, :n] = back
            back = back @ w_hr
        _sigmoid_back(back * squashed, o, grad_input=do)
        d_cell = dc[:n].add_(torch.ops.aten.tanh_backward(back * o, squashed))
        _sigmoid_back(d_cell * g, i, grad_input=di)
        _sigmoid_back(d_cell * before[t, :n], f, grad_input=df)
        _tanh_back(d_cell * i, g, grad_input=dg)
        d_cell.mul_(f)
        torch.mm(delta[t, :n], w_hh, out=dh[:n])
    return delta, delta, (dh, dc), projection or None


def _gru(x: Tensor, run: _Run) -> Any:
    (h,), (w_ih, w_hh, b_ih, b_hh, _), sizes, order = run
    gates, size = F.linear(x, w_ih, b_ih), h.shape[1]
    out, news = h.new_empty(len(x), *h.shape), h.new_zeros(len(x), *h.shape)
    for t in order:
        n = sizes[t]
        inner = F.linear(h[:n], w_hh, b_hh)
        gates[t, :n, : 2 * size].add_(inner[:, : 2 * size]).sigmoid_()
        r, z, new = gates[t, :n].chunk(3, 1)
        news[t, :n] = inner[:, 2 * size :]
        new.addcmul_(r, news[t, :n]).tanh_()
        torch.lerp(new, h[:n], z, out=out[t, :n])
        h = _carry(out, t, n, h)
    return out, (h,), (gates, news)


def _gru_back(out: Tensor, kept: Tensors, d_out: Tensor, d_last: Tensors, run: _Run) -> Any:
    (gates, news), (dh,), ((first,), (_, w_hh, *_), sizes, order) = kept, d_last, run
    before = _previous(out, first, order)
    delta, inner = torch.zeros_like(gates), torch.zeros_like(gates)
    for t in reversed(order):
        n = sizes[t]
        r, z, new = gates[t, :n].chunk(3, 1)
        dr, dz, d_new = delta[t, :n].chunk(3, 1)
        back = dh[:n] + d_out[t, :n]
        _tanh_back(back * (1 - z), new, grad_input=d_new)
        _sigmoid_back(back * (before[t, :n] - new), z, grad_input=dz)
        _sigmoid_back(d_new * news[t, :n], r, grad_input=dr)
        inner[t, :n] = delta[t, :n]
        inner[t, :n].chunk(3, 1)[2].mul_(r)
        dh[:n] = torch.addmm(back.mul_(z), inner[t, :n], w_hh)
    return delta, inner, (dh,), None


def _rnn(squash: Callable, x: Tensor, run: _Run) -> Any:
    (h,), (w_ih, w_hh, b_ih, b_hh, _), sizes, order = run
    inner = F.linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
    out = h.new_empty(len(x), *h.shape)
    for t in order:
        n = sizes[t]
        out[t, :n] = squash(inner[t, :n].addmm_(h[:n], w_hh.T))
        h = _carry(out, t, n, h)
    return out, (h,), ()


def _rnn_back(
    back: Callable, out: Tensor, kept: Tensors, d_out: Tensor, d_last: Tensors, run: _Run
) -> Any:
    (dh,), (_, (_, w_hh, *_), sizes, order) = d_last, run
    delta = torch.zeros_like(out)
    for t in reversed(order):
        n = sizes[t]
        delta[t, :n] = back(dh[:n] + d_out[t, :n], out[t, :n])
        torch.mm(delta[t, :n], w_hh, out=dh[:n])
    return delta, delta, (dh,), None


class _Layer(torch.autograd.Function):
    """One layer in one direction."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: _Cell,
        sizes: List[int],
        order: range,
        weight_gradient: Gradient,
        x: Tensor,
        *rest: Any,
    ) -> Tuple[Tensor, ...]:
        with torch.autocast(x.device.type, enabled=False):
            out, last, kept = cell.forward(
                x, _Run(rest[: cell.states], rest[cell.states :], sizes, order)
            )
        ctx.save_for_backward(x, out, *rest, *kept)
        ctx.cell, ctx.sizes, ctx.order, ctx.weight_gradient = cell, sizes, order, weight_gradient
        return out, *(states.clone() for states in last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *d_last: Tensor) -> tuple:
        cell = ctx.cell
        x, out, *rest = ctx.saved_tensors
        state, weights, kept = (
            rest[: cell.states],
            rest[cell.states : cell.states + 5],
            rest[cell.states + 5 :],
        )
        run, last = (
            _Run(state, weights, ctx.sizes, ctx.order),
            [d.contiguous().clone() for d in d_last],
        )
        with torch.autocast(x.device.type, enabled=False):
            outer, inner, d_first, projection = cell.backward(out, kept, d_out, last, run)
            hidden = _previous(out, state[0], ctx.order)
            pairs = [(x, outer), (hidden, inner), (None, outer), (None, inner), projection]
            gradients = [
                None
                if weight is None or not needed
                else ctx.weight_gradient(
                    weight, *(t if t is None else t.transpose(0, 1) for t in pair)
                )
                for weight, pair, needed in zip(
                    weights, pairs, ctx.needs_input_grad[5 + cell.states :]
                )
            ]
            dx = outer @ weights[0] if ctx.needs_input_grad[4] else None
        return None, None, None, None, dx, *d_first, *gradients


def _layers(
    cell: _Cell,
    x: Tensor,
    states: Tensors,
    params: Tensors,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    sizes: List[int],
    weight_gradient: Gradient,
) -> Tuple[Tensor, List[Tensor]]:
    """Runs all layers; returns (out, last states)."""
    orders = [range(len(x)), range(len(x))[::-1]][: 2 if bidirectional else 1]
    each = len(params) // (layers * len(orders))
    lasts: List[Any] = []
    for layer in range(layers):
        outs = []
        for order in orders:
            number = len(lasts)
            weights: List[Any] = list(params[number * each : (number + 1) * each])
            weights[2:2] = [] if biases else [None, None]
            weights += [None] * (5 - len(weights))
            out, *last = _Layer.apply(
                cell,
                sizes,
                order,
                weight_gradient,
                x,
                *(state[number] for state in states),
                *weights,
            )
            outs.append(out)
            lasts.append(last)
        x = torch.cat(outs, 2) if bidirectional else outs[0]
        if layer < layers - 1:
            x = F.dropout(x, dropout, train)
    return x, [torch.stack(last) for last in zip(*lasts)]


def _sequences(cell: _Cell, weight_gradient: Gradient, x: Tensor, *args: Any) -> Tuple[Tensor, ...]:
    """`torch.lstm` and its like, of padded and of packed sequences."""
    packed = isinstance(args[0], Tensor) and isinstance(args[2], (list, tuple))
    # Where the sequences are packed; else there is no such argument.
    lengths: Any = args[0]
    states, params, biases, layers, dropout, train, bidirectional, *batch_first = args[
        int(packed) :
    ]
    states = [states] if cell.states == 1 else states
    # Under autocast an input may have another.
    dtype = params[0].dtype
    x, states = x.to(dtype), [state.to(dtype) for state in states]
    weight_gradient = functools.partial(weight_gradient, packed=packed)
    if packed:
        sizes = lengths.tolist()
        times = torch.arange(sizes[0], dtype=torch.int64, device="cpu")
        there = (times < lengths[:, None]).to(x.device)
        x = x.new_zeros(*there.shape, x.shape[1]).masked_scatter(there[..., None], x)
    else:
        x = x.transpose(0, 1) if batch_first[0] else x
        sizes = [x.shape[1]] * len(x)
    out, lasts = _layers(
        cell,
        x,
        states,
        params,
        biases,
        layers,
        dropout,
        train,
        bidirectional,
        sizes,
        weight_gradient,
    )
    out = out[there] if packed else out.transpose(0, 1) if batch_first[0] else out
    return out, *lasts


def _single(cell: _Cell, weight_gradient: Gradient, x: Tensor, states: Any, *weights: Any) -> Any:
    """`torch.lstm_cell` and its like."""
    dtype = weights[0].dtype
    first = [state.to(dtype) for state in ([states] if cell.states == 1 else states)]
    weights = (*weights, *[None] * (5 - len(weights)))
    _, *last = _Layer.apply(
        cell,
        [len(x)],
        range(1),
        functools.partial(weight_gradient, packed=False),
        x.to(dtype)[None],
        *first,
        *weights,
    )
    return last[0] if cell.states == 1 else tuple(last)


_CELLS: Dict[str, _Cell] = {
    "lstm": _Cell(2, _lstm, _lstm_back),
    "gru": _Cell(1, _gru, _gru_back),
    "rnn_tanh": _Cell(
        1,
        functools.partial(_rnn, torch.tanh),
        functools.partial(_rnn_back, torch.ops.aten.tanh_backward),
    ),
    "rnn_relu": _Cell(
        1,
        functools.partial(_rnn, torch.relu),
        functools.partial(_rnn_back, lambda d, out: torch.ops.aten.threshold_backward(d, out, 0)),
    ),
}
# {torch's function: the same with a first argument `weight_gradient`}. weight_gradient(weight, x,
# δ, packed=…) is called in the backward pass for every weight and returns its gradient: the sum
# over b and p of δ[b, p, o]·x[b, p, i], or, of a bias, where x is None, of δ[b, p, o].
FUNCTIONS = {
    getattr(torch, f"{name}{kind}"): functools.partial(function, cell)
    for name, cell in _CELLS.items()
    for kind, function in (("", _sequences), ("_cell", _single))
}
