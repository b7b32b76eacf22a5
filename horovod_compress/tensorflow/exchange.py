"""The exchange of tensors that a graph's executor brings in any order, several at a time."""
import dataclasses
import itertools
import threading

import numpy as np

from ..compressors.base import Agree
from ..exchange import Exchange, Run, dense_until, is_count, refuse
from ..handshake import first_difference
from ..transport.base import Transport

_KEPT = 100  # calls


class _Messages(Transport):
    """Keeps what was started until the graph's operations take it, and what they brought until it is asked for."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.started, self.arrived = {}, {}

    def allgather(self, name, payload):
        self.started[name] = payload
        return lambda: self.arrived.pop(name)

    def allreduce(self, name, array, op="sum"):
        return self.allgather(name, array)


class GraphExchange(Exchange):
    """One rank's side of a compression whose payloads are moved by operations of a graph.

    A step is one call of a traced function; it begins with `begin`. Its tensors come and go in any order, and in several threads:
    one may be finished before another is submitted. None of the methods waits. `submit` and `advance` return the message that an
    operation is to move next, as the tensor's `stages` say (None in a step that goes dense), and the next call of that tensor
    brings the result. One tensor, the herald, sends the step's number too, where there are sums.
    """

    def __init__(self, compressor, rank, size, label, discardable=False):
        super().__init__(compressor, _Messages(rank, size), {}, label, discardable)
        self._lock = threading.Lock()  # for what tensors share; each tensor's own is in one thread at a time
        self._calls = itertools.count()
        self._begun = {}  # call → (its run, how many tensors are to come)
        self._last = {}  # name → (call, run) of the tensor's last step, until that is settled
        self._steps = {}  # name → steps it has taken
        self._awaited = {}  # name → what its message is called
        self._rounds = {}  # name → the round that it is in
        self._beat = f"{label}:step"
        self.herald = None

    def add(self, name, shape, variant, saved=None):
        """Makes a tensor known; returns its compressor and stages. saved: what `load_state_dict` returned for it; ValueError, and the
        tensor stays unknown, where that does not fit."""
        self._know(name, shape, variant)
        arrays, self._steps[name], self._tensors[name].dense_until = saved or (None, 0, 0)
        if saved:
            try:
                self._restore({name: self._tensors[name].state.arrays}, {name: arrays})
            except ValueError:
                del self._tensors[name], self._steps[name]
                raise
        chosen = self._tensors[name].compressor
        stages = chosen.stages(self.transport.size)
        if self.herald is None and any(op == "sum" for op, _ in stages):
            self.herald = name
        return chosen, stages

    def begin(self, tensors):
        """Begins a step of so many tensors; returns the number of the call."""
        with self._lock:
            call = next(self._calls)
            self._begun.pop(call - _KEPT, None)  # some never bring all: what nobody uses is not computed
            self._begun[call] = Run(0), tensors
            return call

    def submit(self, name, grad, call, squares=None, squared_norm=None, lr=None):
        """Takes a tensor's flat float32 gradient into a step; returns (carrier, message, the herald's numbers or None).

        grad's memory belongs to the exchange until `finish`. squares, lr: as in Step; squared_norm: where they are to be
        clipped, of factor · (all gradients of the step), factor being what the host makes of a 1 on each rank. A tensor that was
        never finished abandons its last step.
        """
        self._settle(name)
        with self._lock:
            run, missing = self._begun.pop(call)
            if missing > 1:
                self._begun[call] = run, missing - 1
        if name == self.herald:
            run.number = self._steps[name]
        scale = 1.0 if squared_norm is None else self._clipping(float(squared_norm))
        step = dataclasses.replace(self._now, index=self._steps[name], scale=scale, squares=squares, lr=lr)
        self._steps[name] += 1
        self._last[name] = call, run
        pending = self._begin(name, grad, run, step)
        message = self._message(pending)
        return pending.carrier, message, self.transport.started.pop(self._beat, None) if name == self.herald else None

    def advance(self, name, call, arrived, beat=None):
        """Brings what became of a message, and the sum of the herald's numbers; returns the next message."""
        pending = self._arrive(name, call, arrived, beat)
        if name in self._rounds:
            next(self._rounds.pop(name), None)
        return self._message(pending)

    def finish(self, name, call, reduced, arrived=None, beat=None):
        """Brings the carrier as the host reduced it, and what became of the last message; returns the flat float32 result, in the
        memory of the gradient or of the carrier."""
        pending = self._arrive(name, call, arrived, beat)
        if pending.wait is None and reduced.dtype == np.float32:  # the carrier was the payload
            pending.grad = reduced
        super().finish(name, reduced)
        return pending.grad

    def flush(self, factor=1.0):
        """Nothing waits for a whole step."""

    def _goes_on(self, pending):
        """`_message` takes it further."""

    def reject(self, name):
        """The host could not use this result, on all ranks alike: its step will be rolled back."""
        self._last[name][1].finite = False

    def _message(self, pending):
        """What this tensor has started."""
        name = pending.tensor.name
        prefix = f"{self._label}.{name}"
        if pending.encoding is not None:
            asking = [pending] if isinstance(pending.request, Agree) else []
            self._rounds[name] = self._round([pending], asking, f"{prefix}:agree")
            next(self._rounds[name])
        for awaited in (prefix, f"{prefix}.round", f"{prefix}:agree"):
            if awaited in self.transport.started:
                self._awaited[name] = awaited
                return self.transport.started.pop(awaited)
        return None

    def _arrive(self, name, call, arrived, beat):
        if self._last.get(name, (None,))[0] != call or name not in self._open:
            raise RuntimeError(
                f"{name}: another gradient of it came before this one was exchanged. One compression serves one model, and one step "
                "at a time: make a compression for each tape or optimizer whose steps may overlap"
            )
        if name in self._awaited:
            self.transport.arrived[self._awaited.pop(name)] = arrived
        if beat is not None:
            self.transport.arrived[self._beat] = beat
        return self._open[name]

    def _tell_step(self, pending):
        if pending.tensor.name == self.herald:
            super()._tell_step(pending)

    def _compare_steps(self, pending):
        if pending.tensor.name == self.herald:
            super()._compare_steps(pending)

    def _settle(self, name):
        """Ends a tensor's last step where that has not happened yet."""
        if name not in self._last:
            return
        _, run = self._last.pop(name)
        abandoned = self._open.pop(name, None) is not None
        self._rounds.pop(name, None)
        self._awaited.pop(name, None)
        tensor, succeeded = self._tensors[name], run.finite and not abandoned
        tensor.end_step(succeeded)
        with self._lock:
            if run.tensors:  # the first of its step
                self._steps_ended += 1
                self._steps_undone += not succeeded
                run.tensors.clear()

    def settle(self):
        if self._open:
            raise RuntimeError(f"a step is under way or was given up ({', '.join(list(self._open)[:3])} … not finished)")
        for name in list(self._last):
            self._settle(name)

    def state_dict(self):
        return {**super().state_dict(), "step": dict(self._steps)}

    def _wrong_step(self, step):
        if not isinstance(step, dict):
            return "step", "steps by tensor", step
        return next(((f"step.{name}", "a whole number", number) for name, number in step.items() if not is_count(number)), None)

    def load_state_dict(self, state):
        """Continues from a state_dict of the same rank, size and model. Returns what is in it for tensors that are not known yet:
        {name: (arrays, steps taken, dense until)}, for `add`. ValueError, and nothing changed, for any other state."""
        arrays, steps = self._checked(state)
        refuse(first_difference(dict.fromkeys(arrays, "there"), dict.fromkeys(steps, "there"), "step"))
        known = [name for name in arrays if name in self._tensors]
        self._restore(self.arrays(), {name: arrays[name] for name in known})
        self._steps.update((name, steps[name]) for name in known)
        self._latest = Run(0)
        for name in known:
            self._tensors[name].dense_until = dense_until(state, name)
        return {name: (arrays[name], steps[name], dense_until(state, name)) for name in arrays if name not in self._tensors}
