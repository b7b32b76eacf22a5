"""The last exchange of all tensors of a step whose payloads travel together."""

import time
from typing import Any, Callable, Iterator, Sequence

from ..compressors.base import Step
from ..protocol.requests import Lengths
from .pending import FAILED, LAST, Pending


def exchange_jointly(
    waiting: Sequence[Pending], step: Step, lengths: Lengths, start: Callable[..., Any]
) -> Iterator[None]:
    """Makes the last exchange of steps that have one together.

    Args:
        waiting: the steps.
        step: what is known of all of them.
        lengths: as of `Joint.exchange`.
        start: starts a collective, of which it gets the end of the name, the request and a tensor;
            returns a function that waits for it.

    Yields:
        When it has started something, before it waits for it.
    """
    # In an order that is one on all ranks.
    named = sorted(
        (tensor.name, tensor, joint)
        for pending in waiting
        for tensor, joint in zip(pending.tensors, pending.request.request)
    )
    for pending in waiting:
        pending.stage = FAILED
    joints, (_, first, joint) = [joint for _, _, joint in named], named[0]
    exchanging = joint.exchange(joints, step, lengths)
    answer: Any = None
    try:
        while True:
            started = time.perf_counter()
            request = exchanging.send(answer)
            wait = start(f":{joint.label}.{request.verb}", request, first)
            first.counters["encode_seconds"] += time.perf_counter() - started
            yield
            started = time.perf_counter()
            answer = wait()
            first.counters["exchange_seconds"] += time.perf_counter() - started
    except StopIteration as stop:
        found = {name: arrived for (name, _, _), arrived in zip(named, stop.value)}
    for pending in waiting:
        its = [found[tensor.name] for tensor in pending.tensors]
        for tensor, arrived in zip(pending.tensors, its):
            tensor.counters["bytes_sent"] += arrived.sent
            tensor.counters["bytes_received"] += arrived.received
        pending.waits = [[arrived.result for arrived in its].copy]
        pending.stage = LAST
