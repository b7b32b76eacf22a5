"""Launchers that build the optimizer themselves take a compression as an argument, and pickle it to
the ranks."""

import sys

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import cloudpickle
import horovod
import torch

import horovod_compress.torch as hvdc

pytestmark = pytest.mark.extended


def trained(compression):
    """On each rank: (parameters after some steps, what was sent)."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    torch.manual_seed(hvd.rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().numpy(), compression.stats()["bytes_sent"]


def test_a_compression_travels_to_ranks():
    """It is made here, where Horovod is not initialized."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    compression = hvdc.Compression.dgc(ratio=0.05)
    (first, sent), (second, _) = horovod.run(
        trained, args=(compression,), num_proc=2, use_gloo=True
    )
    assert (first == second).all() and 0 < sent < 5 * 4 * first.size / 2
    assert not torch.equal(torch.from_numpy(first), torch.zeros(64, 64))
