"""Backward passes, seen from a hook within."""

import functools
import weakref
from typing import Any, Callable

import torch


def in_backward() -> bool:
    """Returns whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_end(callback: Callable[[], Any]) -> Callable[[], bool]:
    """Has a function called when the backward pass ends in which this is called. Not where it
    fails.

    Returns:
        A function that says, to any thread, whether the pass goes on.
    """
    # Autograd keeps it until the pass has ended or failed.
    kept = functools.partial(callback)
    torch.autograd.Variable._execution_engine.queue_callback(kept)
    reference = weakref.ref(kept)
    return lambda: reference() is not None


def pass_under_way() -> Callable[[], bool]:
    """Returns a function that says whether the backward pass goes on that this is called in, to any
    thread."""
    if not in_backward():
        # The rank has joined, and is nowhere else meanwhile.
        return lambda: True
    goes_on = at_end(bool)
    # One pass may be within another.
    return lambda: goes_on() or in_backward()
