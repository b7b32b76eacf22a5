"""For every id of available(): all ranks come to the same results, whatever the order, the ranks'
kernels, or the kernels of all."""

import itertools

import numpy as np
import pytest
from battery_facts import SHAPES, bytes_of, over, quiet, shaped, spec_of, steps_of, variants
from ranks import ranks_of

import horovod_compress as hc
from horovod_compress import kernels
from horovod_compress.engine.lockstep import mean_of, run_step
from horovod_compress.kernels import reference

pytestmark = quiet


# -- replicas agree


@over(variants)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_replicas_agree_bit_for_bit(id, options, size):
    exchanges = ranks_of(spec_of(id, options), size, SHAPES)
    for ranks in steps_of(size, 4, size):
        results = bytes_of(run_step(exchanges, ranks))
        assert all(result == results[0] for result in results)


@over(variants)
def test_the_order_of_submission_may_differ_between_ranks(id, options):
    orders = [["w", "conv", "bias"], ["bias", "w", "conv"], ["conv", "bias", "w"]]
    (steps,), (again,) = steps_of(0, 1, 3), steps_of(0, 1, 3)
    expected = bytes_of(run_step(ranks_of(spec_of(id, options), 3, SHAPES), steps))
    reordered = [{n: named[n] for n in order} for named, order in zip(again, orders)]
    assert bytes_of(run_step(ranks_of(spec_of(id, options), 3, SHAPES), reordered)) == expected


# -- backends


@pytest.mark.skipif(
    kernels.backend != "native", reason="needs native kernels, which were not built"
)
@over(variants)
def test_ranks_on_different_kernels_agree(id, options, monkeypatch):
    """Rank 0 has native kernels, rank 1 the reference. Where replicas then differ, the handshake
    compares the kernels."""
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)

    def use(rank):
        monkeypatch.setattr(kernels, "cpu", reference if rank else kernels.native)
        return exchanges[rank]

    def rounds_of(rank):
        for _ in use(rank).rounds():
            yield
            use(rank)

    for grads in steps_of(0, 4, 2):
        carriers = [
            {n: use(rank).submit(n, g) for n, g in named.items()}
            for rank, named in enumerate(grads)
        ]
        for _ in itertools.zip_longest(*map(rounds_of, range(2))):
            # Every rank starts a round before any waits for it.
            pass
        for name in SHAPES:
            reduced = mean_of([named[name] for named in carriers])
            for rank in range(2):
                use(rank).finish(name, reduced)
            same = np.array_equal(*(named[name] for named in grads), equal_nan=True)
            assert same or exchanges[0].tensors.compressor.traits.same_kernels, name


@over(variants)
def test_the_reference_kernels_do_the_same(id, options, monkeypatch):
    """The runs that native kernels and the reference make; which of the largest are sent may
    differ."""
    grads = shaped(steps_of(0, 4, 3))
    native = hc.simulate(spec_of(id, options), grads)
    monkeypatch.setattr(kernels, "cpu", reference)
    stated = hc.simulate(spec_of(id, options), grads)
    if id not in ("dgc", "topk"):
        assert native.bytes_sent == stated.bytes_sent
        for mean, its_mean in zip(native.mean, stated.mean):
            for name in SHAPES:
                np.testing.assert_allclose(
                    mean[name], its_mean[name], rtol=2e-5, atol=2e-5 * np.abs(mean[name]).max()
                )
