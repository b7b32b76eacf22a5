"""Kernels of lists of tensors: each tensor's result is the one that it has alone."""

import copy

import kernel_arguments
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_arguments import KERNELS, VALUES, Arguments, assert_same, trimmed
from one_tensor import LISTS, One, arrays_of
from test_kernels_sums import SUMS
from tiers import examples

from horovod_compress import kernels
from horovod_compress.kernels import reference


def encode_sparse(a):
    indices, kind = a.indices(), a.one_of(*VALUES)
    values, scales = reference.sparse.code_values(a.finite(len(indices)), kind)
    return dict(indices=indices, values=values, kind=kind, scales=scales)


ARGUMENTS = {
    **{name: getattr(kernel_arguments, name) for name in set(KERNELS) & set(LISTS)},
    **SUMS,
    "encode_sparse": encode_sparse,
}
MODULES = pytest.mark.parametrize(
    "module",
    list(dict.fromkeys([reference, kernels.cpu])),
    ids=lambda module: module.__name__.rpartition(".")[2],
)


def all_at_once(module, name, calls):
    """The results of a kernel of all tensors, whose arguments are in `calls`."""
    names = arrays_of(name)
    options = {key: [call[key] for call in calls] for key in calls[0].keys() - names}
    return getattr(module, name)(*([call.get(key) for call in calls] for key in names), **options)


def test_all_kernels_are_looked_at():
    assert sorted(ARGUMENTS) == LISTS


@MODULES
@pytest.mark.parametrize("name", LISTS)
@examples(30)
@given(data=st.data())
def test_tensors_of_a_list_are_as_each_alone(module, name, data):
    """With options of their own."""
    together = [ARGUMENTS[name](Arguments(data)) for _ in range(data.draw(st.integers(1, 4)))]
    alone = copy.deepcopy(together)
    with np.errstate(all="ignore"):
        found = all_at_once(module, name, together)
        expected = [getattr(One(module), name)(**call) for call in alone]
    if name == "encode_buckets":
        found, expected = ([trimmed(each) for each in results] for results in (found, expected))
    assert_same(found, expected)
    assert_same([list(call.values()) for call in together], [list(call.values()) for call in alone])


def tensors():
    rng = np.random.default_rng(0)
    return [
        [rng.standard_normal(size).astype(np.float32) for size in (100, 7, 64)] for _ in range(3)
    ]


@MODULES
def test_what_is_no_list_counts_for_all_tensors(module):
    own = dict(k=[3, 1, 9], samples=100, offset=0, momentum=0.9, masked=[100, 0, 64])
    for_all = module.encode_topk(*tensors(), **own, kind="2bit", scale=0.5, base=None)
    for_each = module.encode_topk(
        *tensors(),
        **own,
        kind=["2bit"] * 3,
        scale=[0.5] * 3,
        base=[None] * 3,
    )
    assert_same(for_all, for_each)
    grads, _, vs = tensors()
    encoded = module.encode_topk(grads, None, vs, **own, kind="fp32")
    (alone,) = module.encode_topk(
        tensors()[0][2:], [None], tensors()[2][2:], k=9, samples=100, offset=0, kind="fp32"
    )
    assert encoded[2].body.tobytes() == alone.body.tobytes()
    values, _ = reference.sparse.code_values(np.float32([1, 2]), "2bit")
    for scales in ((1.0, 2.0, 3.0, 4.0), [[1.0, 2.0, 3.0, 4.0]] * 2):
        encoded = module.encode_sparse(
            [np.uint32([1, 5])] * 2, [np.float32([1, 4])] * 2, kind="2bit", scales=scales
        )
        decoded = module.decode_sparse([each.body for each in encoded], numel=[6, 10])
        assert [values.tolist() for _, values in decoded] == [[1, 4]] * 2


@MODULES
def test_lists_of_no_tensors(module):
    assert module.max_abs([]) == module.move([], [], scale=[]) == []


@MODULES
def test_lists_that_do_not_fit_are_refused(module):
    grads, others, _ = tensors()
    for arguments, options in (
        ([grads, others[:2]], {"scale": 1.0}),
        ([grads, others], {"scale": [1.0, 1.0]}),
    ):
        with pytest.raises(ValueError, match="lists must have a value for each tensor"):
            module.move(*arguments, **options)
    for arguments in ([grads[0], others[0]], [grads, tuple(others)], [grads, others[0]]):
        with pytest.raises(TypeError):
            module.move(*arguments, scale=1.0)
    with pytest.raises(ValueError):
        module.move(grads, others[::-1], scale=1.0)
