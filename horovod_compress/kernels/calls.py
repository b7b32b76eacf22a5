"""Calls of kernels on a device that tensors make together, because a launch for each of them would take longer than its work."""
import dataclasses
from typing import Any, Callable, Dict, Generator, Tuple


@dataclasses.dataclass
class DeviceCall:
    """A call that is to be made. where: the array that says on which device; name: the kernel's; arrays, options: its positional arguments, and those
    by keyword; ready: where the device has streams, the event after which its arrays can be used; then: what makes of its result what was asked for,
    or another call."""

    where: Any
    name: str
    arrays: Tuple[Any, ...]
    options: Dict[str, Any]
    ready: Any = None
    then: Callable[[Any], Any] = lambda result: result

    def result_of(self, answer: Any) -> Any:
        """What was asked for, or the next call, by what the kernel has returned; raises that where it is an exception."""
        if isinstance(answer, Exception):
            raise answer
        return self.then(answer)


class Deferred:
    """The kernels that work where an array is, on a device: the functions of `kernels.host` by the same names. They return DeviceCalls."""

    def __init__(self, where: Any) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Callable[..., DeviceCall]:
        where = self._where
        return lambda *arrays, **options: DeviceCall(where, name, arrays, options, where.ready())


def after(result: Any, then: Callable[[Any], Any]) -> Any:
    """What `then` makes of a result, or of what a call will bring."""
    if not isinstance(result, DeviceCall):
        return then(result)
    before = result.then
    return dataclasses.replace(result, then=lambda answer: after(before(answer), then))


def answered(result: Any) -> Generator[DeviceCall, Any, Any]:
    """Yields the calls that a result waits for, is sent what they return, and returns the result."""
    while isinstance(result, DeviceCall):
        result = result.result_of((yield result))
    return result
