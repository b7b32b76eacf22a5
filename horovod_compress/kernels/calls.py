"""Calls of kernels on a device that tensors make together, because a launch for each of them would
take longer than its work."""

import dataclasses
from typing import Any, Callable, Dict, Generator, List, Tuple


@dataclasses.dataclass
class DeviceCall:
    """A call that is to be made.

    where: the array that says on which device; name: the kernel's; arrays, options: its positional
    arguments, and those by keyword; stream: the number of the GPU stream on which its arrays become
    ready, None on the host; thens: functions that make of the kernel's result, one after another,
    the final result or another call.
    """

    where: Any
    name: str
    arrays: Tuple[Any, ...]
    options: Dict[str, Any]
    stream: Any = None
    thens: List[Callable[[Any], Any]] = dataclasses.field(default_factory=list)

    def result_of(self, answer: Any) -> Any:
        """What was asked for, or the next call, by what the kernel has returned; raises that where
        it is an exception."""
        if isinstance(answer, Exception):
            raise answer
        for number, then in enumerate(self.thens, 1):
            answer = then(answer)
            if isinstance(answer, DeviceCall):
                answer.thens += self.thens[number:]
                break
        return answer


class Deferred:
    """The kernels that work where an array is, on a device: the functions of `kernels.host` by the
    same names. They return DeviceCalls."""

    def __init__(self, where: Any) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Callable[..., DeviceCall]:
        where = self._where
        return lambda *arrays, **options: DeviceCall(where, name, arrays, options, where.stream())


def after(result: Any, then: Callable[[Any], Any]) -> Any:
    """What `then` makes of a result, or of what a call will bring."""
    if not isinstance(result, DeviceCall):
        return then(result)
    result.thens.append(then)
    return result


def answered(result: Any) -> Generator[DeviceCall, Any, Any]:
    """Yields the calls that a result waits for, is sent what they return, and returns the
    result."""
    while isinstance(result, DeviceCall):
        result = result.result_of((yield result))
    return result
