"""Methods of one tensor and of a group, which a class has by pairs. It overrides one of a pair, and
gets the other made of that."""

import functools
import itertools
from types import GeneratorType
from typing import Any, Callable, Dict, Generator, Iterable, List, Sequence, Union

from ..kernels import Late

Method = Callable[..., Any]
# What a method returns, or a generator that asks first and returns so.
Encodings = Union[List[Any], Generator[Any, Any, List[Any]]]

# By method: makes it of the group's, which is called so with _all behind.
_OF_GROUP: Dict[str, Callable[[Method], Method]] = {
    "encode": lambda group: (
        lambda self, grad, state, step: only(group(self, [grad], [state], [step]))
    ),
    "encode_dense": lambda group: (
        lambda self, grad, state, step: only(group(self, [grad], [state], [step]))
    ),
    "accumulate": lambda group: (
        lambda self, grad, state, step: only(group(self, [grad], [state], [step]))
    ),
    "pack": lambda group: (
        lambda self, grad, residual, state, step: only(
            group(self, [grad], [residual], [state], [step])
        )
    ),
    "decode": lambda group: (
        lambda self, summed, out, state, step, scale: only(
            group(self, [summed], [out], [state], [step], scale)
        )
    ),
    "decode_dense": lambda group: (
        lambda self, reduced, out, state, scale: only(group(self, [reduced], [out], [state], scale))
    ),
    "add": lambda group: lambda self, body, out, scale: only(group(self, [body], [out], scale)),
}


def complete(cls: type) -> None:
    """Gives a class the other method of each pair of which it overrides one, or a base does that is
    no Compressor."""
    for one, of_group in _OF_GROUP.items():
        group = f"{one}_all"
        own: Any = next((vars(c) for c in cls.__mro__ if one in vars(c) or group in vars(c)), {})
        if one in own and group not in own:
            _set(cls, group, _for_each(own[one]))
        elif group in own and one not in own:
            _set(cls, one, of_group(own[group]))


def _set(cls: type, name: str, method: Method) -> None:
    inherited = getattr(cls, name, method)
    setattr(cls, name, functools.update_wrapper(method, inherited, updated=()))


def _for_each(one: Method) -> Method:
    def method(self: Any, *arguments: Any) -> Encodings:
        return for_each(itertools.repeat(functools.partial(one, self)), *arguments)

    return method


def for_each(methods: Iterable[Method], *arguments: Any) -> Encodings:
    """Calls a method of one tensor for each of several tensors. Lists among the arguments have a
    value for each, and other values are for all."""
    columns = [
        each if isinstance(each, (list, tuple)) else itertools.repeat(each) for each in arguments
    ]
    return in_lockstep([method(*each) for method, *each in zip(methods, *columns)])


def in_lockstep(encodings: Sequence[Any]) -> Encodings:
    """The payloads of tensors, each of which is there or comes of a generator. All those that ask
    do so in the same rounds."""
    if any(isinstance(each, GeneratorType) for each in encodings):
        return _lockstep(encodings)
    return list(encodings)


def _lockstep(encodings: Sequence[Any]) -> Generator[Any, Any, List[Any]]:
    payloads, answers = list(encodings), [None] * len(encodings)
    asking = [i for i, each in enumerate(encodings) if isinstance(each, GeneratorType)]
    try:
        while True:
            requests = [None] * len(encodings)
            for i in asking.copy():
                try:
                    requests[i] = encodings[i].send(answers[i])
                except StopIteration as stop:
                    payloads[i] = stop.value
                    asking.remove(i)
            if not asking:
                return payloads
            answers = yield requests
    finally:
        for i in asking:
            encodings[i].close()


def only(encodings: Any) -> Any:
    """The result of a group of one tensor, as that tensor's method returns it."""
    return encodings[0] if isinstance(encodings, (list, Late)) else _only(encodings)


def _only(asking: Generator[Any, Any, List[Any]]) -> Generator[Any, Any, Any]:
    answer = None
    try:
        while True:
            (request,) = asking.send(answer)
            answer = [(yield request)]
    except StopIteration as stop:
        return stop.value[0]
    finally:
        asking.close()
