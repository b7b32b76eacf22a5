"""What tensors come to in a group is what each comes to alone; and methods of one tensor beside
those of a group."""

import dataclasses
from types import GeneratorType

import numpy as np
import pytest
from battery_facts import over, quiet, spec_of, variants
from ranks import end_step

import horovod_compress as hc
from horovod_compress.compressors.base import Compressor, Step
from horovod_compress.compressors.selective import ErrorFeedback
from horovod_compress.compressors.topk import TopK
from horovod_compress.compressors.wrapper import Wrapper
from horovod_compress.engine.dense_policy import compressor_for
from horovod_compress.kernels import Encoded
from horovod_compress.protocol.requests import Allreduce, ToReducer

# As many columns, so that an algorithm has the same options for each.
SHAPES = {"a": (24, 30), "b.weight": (15, 30), "c": (31, 30)}


def answered(encoding):
    """What an encoding returns where all that it asks for comes from two ranks that are alike."""
    if not isinstance(encoding, GeneratorType):
        return encoding
    answer = None
    try:
        while True:
            answer = answer_of(encoding.send(answer))
    except StopIteration as stop:
        return stop.value


def answer_of(request):
    if isinstance(request, list):
        return [answer_of(each) for each in request]
    return request.array if request.op == "max" else 2 * request.array


class Alone:
    """The methods of one tensor, called for each."""

    def __init__(self, compressor):
        self._compressor = compressor

    def encode_all(self, *lists):
        return [answered(self._compressor.encode(*each)) for each in zip(*lists)]

    def encode_dense_all(self, *lists):
        return [answered(self._compressor.encode_dense(*each)) for each in zip(*lists)]

    def add_all(self, bodies, outs, scale):
        return [self._compressor.add(*each, scale) for each in zip(bodies, outs)]

    def decode_all(self, summed, outs, states, steps, scale):
        lists = zip(summed, outs, states, steps)
        return [self._compressor.decode(*each, scale) for each in lists]

    def decode_dense_all(self, reduced, outs, states, scale):
        return [self._compressor.decode_dense(*each, scale) for each in zip(reduced, outs, states)]


def history(compressor, methods):
    """All that five steps of three tensors make, of which one is not finite for a tensor, one is
    undone and one dense."""
    rng, made = np.random.default_rng(3), []
    states = [compressor.init(name, shape) for name, shape in SHAPES.items()]
    for index in range(5):
        grads = [rng.standard_normal(shape, np.float32).ravel() for shape in SHAPES.values()]
        squares = [grad * grad if index % 2 else None for grad in grads]
        steps = [Step(index, 1, 2, squares=its, lr=0.1 + index) for its in squares]
        # Only of one is it known.
        steps[1] = dataclasses.replace(steps[1], squares=2 * grads[1] ** 2)
        if index == 1:
            grads[2][5] = np.nan
        if index == 3:
            payloads = answered(methods.encode_dense_all(grads, states, steps))
        else:
            payloads = answered(methods.encode_all(grads, states, steps))
        if isinstance(payloads[0], Encoded):
            bodies = [payload.body for payload in payloads]
            finite = [payload.finite for payload in payloads]
            if all(finite):
                finite = methods.add_all(bodies, grads, 0.5)
        elif isinstance(payloads[0], Allreduce):
            bodies = [answer_of(payload) for payload in payloads]
            finite = methods.decode_all(bodies, grads, states, steps, 0.5)
        else:
            assert isinstance(payloads[0], ToReducer)
            bodies = [payload.array.copy() for payload in payloads]
            finite = methods.decode_dense_all(bodies, grads, states, 0.5)
        for state, good in zip(states, finite):
            end_step(compressor, state, good and index != 2)
        if index == 4:
            for state in states:
                compressor.apply_pending(state)
        arrays = [array for state in states for array in state.arrays.values()]
        made.append([each.tobytes() for each in (*bodies, *grads, *arrays)])
        made.append(list(map(bool, finite)))
    return made


@quiet
@over(variants)
def test_tensors_of_a_group_come_to_what_they_come_to_alone(id, options):
    compressor = hc.get_compressor(spec_of(id, options))
    chosen = [compressor_for(compressor, name, shape) for name, shape in SHAPES.items()]
    assert chosen == [chosen[0]] * 3
    assert history(chosen[0], chosen[0]) == history(chosen[0], Alone(chosen[0]))


# -- pairs


@dataclasses.dataclass(frozen=True, repr=False)
class One(TopK):
    """Decodes half of what was sent."""

    def add(self, body, out, scale):
        return super().add(body=body, out=out, scale=scale / 2)


@dataclasses.dataclass(frozen=True, repr=False)
class GroupOfOne(One):
    """Half of that."""

    def add_all(self, bodies, outs, scale):
        return super().add_all(bodies, outs, scale / 2)


@dataclasses.dataclass(frozen=True, repr=False)
class OneOfGroup(GroupOfOne):
    """Half of that."""

    def add(self, body, out, scale):
        return super().add(body, out, scale / 2)


class Halving:
    """For a class that is beside it."""

    def add(self, body, out, scale):
        return super().add(body, out, scale / 2)


@dataclasses.dataclass(frozen=True, repr=False)
class Beside(Halving, TopK):
    """Decodes half of what was sent."""


@pytest.mark.parametrize(
    "cls, factor", [(One, 1 / 2), (GroupOfOne, 1 / 4), (OneOfGroup, 1 / 8), (Beside, 1 / 2)]
)
def test_a_class_overrides_a_method_of_one_tensor_or_of_a_group(cls, factor):
    grad = np.arange(1, 101, dtype=np.float32)
    compressor = cls(k=100, min_numel=0)
    body = compressor.encode(grad.copy(), compressor.init("t", (100,)), Step(0, 0, 1)).body
    for its in (compressor, Wrapper(compressor)):
        alone, inside = np.zeros((2, 100), np.float32)
        assert its.add(body, alone, 1.0) and its.add_all([body], [inside], 1.0) == [True]
        assert (alone == factor * grad).all() and (inside == alone).all()


@dataclasses.dataclass(frozen=True, repr=False)
class Asks(Compressor):
    """Asks as often as its tensor's name is long."""

    id = "asks"

    def encode(self, grad, state, step):
        for _ in state.name:
            grad = yield Allreduce(grad)
        return Allreduce(grad)


def test_tensors_of_a_group_ask_in_the_same_rounds():
    asks, names = Asks(), ("", "ab", "c")
    states = [asks.init(name, (1,)) for name in names]
    encoding = asks.encode_all([np.ones(1)] * 3, states, [Step(0, 0, 2)] * 3)
    rounds, answers = [], None
    with pytest.raises(StopIteration) as stopped:
        while True:
            asked = encoding.send(answers)
            rounds.append([each is not None for each in asked])
            answers = [each and each.array + 1 for each in asked]
    assert rounds == [[False, True, True], [False, True, False]]
    assert [payload.array.tolist() for payload in stopped.value.value] == [[1], [3], [2]]


@pytest.mark.parametrize("base, missing", [(Compressor, "encode"), (ErrorFeedback, "pack")])
def test_an_algorithm_without_the_method_that_makes_payloads_says_so(base, missing):
    unfinished = type("Unfinished", (base,), {"id": "unfinished"})()
    with pytest.raises(NotImplementedError, match=f"unfinished needs a method {missing}"):
        unfinished.encode(np.ones(3, np.float32), unfinished.init("t", (3,)), Step(0, 0, 1))
