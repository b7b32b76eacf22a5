"""LSTM, GRU and RNN layers whose backward pass can see the samples apart, which torch's own, fused ones do not let anyone.

The same functions as `torch.lstm`, `torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu` and their cells.
"""
import functools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_sigmoid_back = torch.ops.aten.sigmoid_backward.grad_input
_tanh_back = torch.ops.aten.tanh_backward.grad_input

# A kind of cell has two functions over time, on arrays (time, batch, …). Samples are sorted by length: at step t the first
# sizes[t] of them are there, and the states of the others stay as they are.
#
# forward(x, state, weights, sizes, order) -> (out, last states, what backward needs)
# backward(out, kept, d_out, d_last, state, weights, sizes, order) -> (δ of what the input's weights gave, δ of what the hidden
#     state's gave, gradients of the first states, (input, δ) of the projection or None)


def _previous(states, first, order):
    """What a state, kept for each step, was before the step."""
    parts = (first[None], states[:-1]) if order.step > 0 else (states[1:], first[None])
    return torch.cat(parts)


def _carry(states, t, n, before):
    if n < len(before):
        states[t, n:] = before[n:]


class _LSTM:
    states = 2

    @staticmethod
    def forward(x, state, weights, sizes, order):
        w_ih, w_hh, b_ih, b_hh, w_hr = weights
        h, c = state
        gates = F.linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
        out, cells = h.new_empty(len(x), *h.shape), c.new_empty(len(x), *c.shape)
        for t in order:
            n = sizes[t]
            i, f, g, o = gates[t, :n].addmm_(h[:n], w_hh.T).chunk(4, 1)
            gates[t, :n, : 2 * c.shape[1]].sigmoid_()
            g.tanh_(), o.sigmoid_()
            torch.mul(f, c[:n], out=cells[t, :n]).addcmul_(i, g)
            _carry(cells, t, n, c)
            c = cells[t]
            hidden = o * c[:n].tanh()
            out[t, :n] = hidden if w_hr is None else hidden @ w_hr.T
            _carry(out, t, n, h)
            h = out[t]
        return out, (h, c), (gates, cells)

    @staticmethod
    def backward(out, kept, d_out, d_last, state, weights, sizes, order):
        (gates, cells), (dh, dc), (_, w_hh, *_, w_hr) = kept, d_last, weights
        before = _previous(cells, state[1], order)
        delta = torch.zeros_like(gates) if sizes[-1] < sizes[0] else torch.empty_like(gates)
        hidden, d_hidden = (torch.zeros_like(cells), torch.zeros_like(out)) if w_hr is not None else (None, None)
        for t in reversed(order):
            n = sizes[t]
            i, f, g, o = gates[t, :n].chunk(4, 1)
            di, df, dg, do = delta[t, :n].chunk(4, 1)
            squashed = cells[t, :n].tanh()
            back = dh[:n] + d_out[t, :n]
            if w_hr is not None:
                torch.mul(o, squashed, out=hidden[t, :n])
                d_hidden[t, :n] = back
                back = back @ w_hr
            _sigmoid_back(back * squashed, o, grad_input=do)
            its = dc[:n].add_(torch.ops.aten.tanh_backward(back * o, squashed))
            _sigmoid_back(its * g, i, grad_input=di)
            _sigmoid_back(its * before[t, :n], f, grad_input=df)
            _tanh_back(its * i, g, grad_input=dg)
            its.mul_(f)
            torch.mm(delta[t, :n], w_hh, out=dh[:n])
        return delta, delta, (dh, dc), None if w_hr is None else (hidden, d_hidden)


class _GRU:
    states = 1

    @staticmethod
    def forward(x, state, weights, sizes, order):
        w_ih, w_hh, b_ih, b_hh, _ = weights
        (h,) = state
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
            _carry(out, t, n, h)
            h = out[t]
        return out, (h,), (gates, news)

    @staticmethod
    def backward(out, kept, d_out, d_last, state, weights, sizes, order):
        (gates, news), (dh,), (_, w_hh, *_) = kept, d_last, weights
        before = _previous(out, state[0], order)
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


class _RNN:
    states = 1

    def __init__(self, squash, back):
        self._squash, self._back = squash, back

    def forward(self, x, state, weights, sizes, order):
        w_ih, w_hh, b_ih, b_hh, _ = weights
        (h,) = state
        inner = F.linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
        out = h.new_empty(len(x), *h.shape)
        for t in order:
            n = sizes[t]
            out[t, :n] = self._squash(inner[t, :n].addmm_(h[:n], w_hh.T))
            _carry(out, t, n, h)
            h = out[t]
        return out, (h,), ()

    def backward(self, out, kept, d_out, d_last, state, weights, sizes, order):
        (dh,), (_, w_hh, *_) = d_last, weights
        delta = torch.zeros_like(out)
        for t in reversed(order):
            n = sizes[t]
            delta[t, :n] = self._back(dh[:n] + d_out[t, :n], out[t, :n])
            torch.mm(delta[t, :n], w_hh, out=dh[:n])
        return delta, delta, (dh,), None


class _Layer(torch.autograd.Function):
    """One layer in one direction."""

    @staticmethod
    def forward(ctx, cell, sizes, order, tell, x, *rest):
        state, weights = rest[: cell.states], rest[cell.states :]
        with torch.autocast(x.device.type, enabled=False):
            out, last, kept = cell.forward(x, state, weights, sizes, order)
        ctx.save_for_backward(x, out, *rest, *kept)
        ctx.cell, ctx.sizes, ctx.order, ctx.tell = cell, sizes, order, tell
        return out, *(states.clone() for states in last)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, *d_last):
        cell = ctx.cell
        x, out, *rest = ctx.saved_tensors
        state, weights, kept = rest[: cell.states], rest[cell.states : cell.states + 5], rest[cell.states + 5 :]
        with torch.autocast(x.device.type, enabled=False):
            outer, inner, d_first, projection = cell.backward(
                out, kept, d_out, [d.contiguous().clone() for d in d_last], state, weights, ctx.sizes, ctx.order
            )
            hidden = _previous(out, state[0], ctx.order)
            pairs = [(x, outer), (hidden, inner), (None, outer), (None, inner), projection]
            gradients = [
                None if weight is None or not needed else ctx.tell(weight, *(t if t is None else t.transpose(0, 1) for t in pair))
                for weight, pair, needed in zip(weights, pairs, ctx.needs_input_grad[5 + cell.states :])
            ]
            dx = outer @ weights[0] if ctx.needs_input_grad[4] else None
        return None, None, None, None, dx, *d_first, *gradients


def _layers(cell, x, states, params, biases, layers, dropout, train, bidirectional, sizes, tell):
    """All layers: (out, last states)."""
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    lasts = []
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = list(params[number * each : (number + 1) * each])
            weights[2:2] = [] if biases else [None, None]
            weights += [None] * (5 - len(weights))
            order = range(len(x) - 1, -1, -1) if direction else range(len(x))
            first = [state[number] for state in states]
            out, *last = _Layer.apply(cell, sizes, order, tell, x, *first, *weights)
            outs.append(out)
            lasts.append(last)
        x = torch.cat(outs, 2) if bidirectional else outs[0]
        if layer < layers - 1:
            x = F.dropout(x, dropout, train)
    return x, [torch.stack(last) for last in zip(*lasts)]


def _sequences(cell, tell, x, *args):
    """`torch.lstm` and its like, of padded and of packed sequences."""
    packed = isinstance(args[0], torch.Tensor) and isinstance(args[2], (list, tuple))
    lengths, args = (args[0], args[1:]) if packed else (None, args)
    states, params, biases, layers, dropout, train, bidirectional, *batch_first = args
    states = [states] if cell.states == 1 else states
    dtype = params[0].dtype  # under autocast an input may have another
    x, states = x.to(dtype), [state.to(dtype) for state in states]
    tell = functools.partial(tell, packed=packed)
    if packed:
        sizes = lengths.tolist()
        there = torch.arange(sizes[0]) < lengths[:, None]
        there = there.to(x.device)
        x = x.new_zeros(*there.shape, x.shape[1]).masked_scatter(there[..., None], x)
    else:
        x = x.transpose(0, 1) if batch_first[0] else x
        sizes = [x.shape[1]] * len(x)
    out, lasts = _layers(cell, x, states, params, biases, layers, dropout, train, bidirectional, sizes, tell)
    out = out[there] if packed else out.transpose(0, 1) if batch_first[0] else out
    return out, *lasts


def _step(cell, tell, x, states, *weights):
    """`torch.lstm_cell` and its like."""
    states = [states] if cell.states == 1 else states
    dtype = weights[0].dtype
    weights = (*weights, *[None] * (5 - len(weights)))
    first = [state.to(dtype) for state in states]
    _, *last = _Layer.apply(cell, [len(x)], range(1), functools.partial(tell, packed=False), x.to(dtype)[None], *first, *weights)
    return last[0] if cell.states == 1 else tuple(last)


_CELLS = {
    "lstm": _LSTM,
    "gru": _GRU,
    "rnn_tanh": _RNN(torch.tanh, torch.ops.aten.tanh_backward),
    "rnn_relu": _RNN(torch.relu, lambda d, out: torch.ops.aten.threshold_backward(d, out, 0)),
}
# {torch's function: the same with a first argument `tell`}. tell(weight, x, δ, packed=…) is called in the backward pass for every weight
# and returns its gradient: the sum over b and p of δ[b, p, o]·x[b, p, i], or, of a bias, where x is None, of δ[b, p, o].
FUNCTIONS = {getattr(torch, name): functools.partial(_sequences, cell) for name, cell in _CELLS.items()}
FUNCTIONS |= {getattr(torch, f"{name}_cell"): functools.partial(_step, cell) for name, cell in _CELLS.items()}
