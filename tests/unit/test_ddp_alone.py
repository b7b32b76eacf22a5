"""DistributedDataParallel on one rank, and what needs no ranks at all."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = torch.distributed
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with Gloo", allow_module_level=True)

from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

from horovod_compress import WireError, ddp  # noqa: E402
from horovod_compress.ddp.checks import check_model  # noqa: E402
from horovod_compress.torch_distributed import transport as distributed  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(spec, steps=3):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    compression = ddp.compress(model, optimizer, spec) if spec else None
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()]), compression


@pytest.mark.parametrize("spec", ["none", "dgc:min_numel=0", "powersgd", "auto"])
def test_one_rank_trains_as_without_compression(spec):
    found, compression = trained(spec)
    assert torch.equal(found, trained(None)[0])
    assert compression.stats()["bytes_sent"] == 0
    compression.load_state_dict(compression.state_dict())
    compression.switch("none")


def gathered(transport, lengths):
    """Of gathers of so many bytes: how many each takes, and the bytes of each."""
    messages, sent = [], []
    for length in lengths:
        with pytest.MonkeyPatch.context() as patch:
            gathers, gather = [], distributed._gather_rows
            patch.setattr(
                distributed,
                "_gather_rows",
                lambda rows, row, **options: gathers.append(row) or gather(rows, row, **options),
            )
            assert transport.allgather("g", np.ones(length, np.uint8))().tolist() == [1] * length
        messages.append(len(gathers))
        sent.append(sum(row.nbytes for row in gathers))
    return messages, sent


@pytest.mark.parametrize(
    "before, after",
    [
        # The end of a warm-up, a switch, and their opposites.
        ([100_000] * 20, [1000] * 20),
        ([100_000, 60_000, 100_000] * 5, [1000, 1010, 1005] * 10),
        ([300] * 20, [3000] * 20),
        ([300] * 20, [100_000] * 20),
        # One step that is longer than the rest.
        ([1000] * 9 + [10**7], [1000] * 20),
        ([10**7], [1000] * 20),
        ([1000 * 2**i for i in range(10)], [400, 200, 100] * 8),
    ],
)
def test_rows_are_as_long_as_the_frames_of_late(before, after):
    """Whatever came before, and in one gather where frames are alike."""
    transport = distributed.DistributedTransport(None)
    gathered(transport, before)
    messages, sent = gathered(transport, after)
    assert messages[-9:] == [1] * 9
    assert max(sent[-9:]) <= 32 + 33 / 32 * max(after) + 1
    # Until then nothing is sent again and again that nobody needs.
    assert sum(sent) <= 1.1 * max(sum(after), len(after) * max(after)) + max(before) + 8 * 4096


def test_every_changed_bit_of_a_rows_head_is_noticed(monkeypatch):
    """And changes neither what later rows are cut to nor how much memory this one takes."""
    transport, gather = distributed.DistributedTransport(None), distributed._gather_rows
    damage, sizes = [], []

    def damaging(rows, row, **options):
        work = gather(rows, row, **options)
        work.wait()
        sizes.append(rows.nbytes)
        if damage:
            bit = damage.pop()
            rows[bit // 8] ^= 1 << bit % 8
        return work

    monkeypatch.setattr(distributed, "_gather_rows", damaging)
    frames = {"a": np.ones(50, np.uint8), "b": np.ones(9, np.uint8)}
    for bit in range(8 * (24 + 8 * len(frames))):
        damage.append(bit)
        for wait in [transport.allgather(*each) for each in frames.items()]:
            with pytest.raises(WireError, match="payload of rank 0: the checksum of its lengths"):
                wait()
    waits = [transport.allgather(*each) for each in frames.items()]
    assert [wait().tolist() for wait in waits] == [[1] * 50, [1] * 9]
    assert max(sizes) <= 24 + 16 + 59


def test_a_trial_is_told_its_candidates():
    auto = {"id": "auto", "candidates": ["none", "topk:ratio=0.1"], "probe_steps": 6}
    assert trained(auto)[1].plan["spec"] is None
    with pytest.raises(ValueError, match="candidates must be different"):
        trained({**auto, "candidates": ["none", "none"]})
    with pytest.raises(ValueError, match="margin"):
        trained({**auto, "margin": -1})


def test_updates_on_one_rank_are_the_optimizers_own():
    results = []
    for wrap in (lambda its, _: its, lambda its, _: ddp.UpdateOptimizer(its, compression="topk")):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        optimizer = wrap(ddp.AdamW(model.parameters(), lr=0.1), model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_updates_of_parameters_that_share_memory_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = torch.nn.Parameter(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="0.weight and 1.weight share memory"):
        ddp.UpdateOptimizer(optimizer, named_parameters=model.named_parameters())
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp.UpdateOptimizer(optimizer, named_parameters=model.named_parameters())


def test_updates_of_optimizers_that_exchange_are_refused():
    """ZeRO's ranks would each train the parameters that they step on their own data alone."""
    optimizer = ZeroRedundancyOptimizer(torch.nn.Linear(4, 4).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer exchanges already"):
        ddp.UpdateOptimizer(optimizer)


def test_updates_take_no_list_of_states():
    model = torch.nn.Linear(4, 4)
    optimizer = ddp.UpdateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"loads one state.*list.*portable=True"):
        optimizer.load_state_dict([optimizer.state_dict()])


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_what_needs_horovod_says_so(framework):
    code = f"import sys; sys.modules['horovod'] = None; import horovod_compress.{framework}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'horovod-compress[horovod]'" in done.stderr, done.stderr
    assert "use horovod_compress.ddp" in done.stderr


def test_models_whose_buckets_may_be_left_out_are_refused():
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    if not options.keys() <= inspect.signature(DDP).parameters.keys():
        pytest.skip("this PyTorch leaves out no buckets")
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params does not call"):
        check_model(DDP(torch.nn.Linear(2, 2), **options))


def test_models_on_other_devices_are_served_with_a_warning():
    with pytest.warns(
        RuntimeWarning, match="CPUs and NVIDIA's GPUs only, and this model is on meta"
    ):
        check_model(DDP(torch.nn.Linear(2, 2)).to("meta"))
