"""A model, data that differs between ranks, and a training loop as users write it: what cases under
DistributedDataParallel share."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp

# The dense limit: the same trajectory as plain DDP.
DENSE = "dgc:ratio=1,masking=false,min_numel=0"
BUCKETS = {"bucket_cap_mb": 0.01}


def start():
    """The rank, ready to run cases. Horovod cannot be imported in it."""
    assert "horovod" not in sys.modules
    sys.modules["horovod"] = None
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(os.environ.get("DDP_BACKEND", "gloo"))
    return int(os.environ["RANK"])


class Net(nn.Module):
    """Convolution in channels-last memory, normalization, a layer used twice, a frozen layer, a
    linear layer: 17 thousand parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean(1).flatten(1)
        return self.out(
            torch.relu(self.frozen(torch.relu(self.shared(torch.relu(self.shared(x))))))
        )


def model_of(cls=Net, seed=0):
    torch.manual_seed(seed)
    return cls()


def batches(steps, seed=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        yield (
            torch.randn(8, 3, 8, 8, generator=generator),
            torch.randint(0, 10, (8,), generator=generator),
        )


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def backward(model, x, y):
    nn.functional.cross_entropy(model(x), y).backward()


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()


def wrapped(spec, model=None, ddp_options=(), optimizer=sgd, **options):
    """(DDP's model, optimizer, compression); spec None: plain DDP."""
    model = DDP(model or model_of(), **{**BUCKETS, **dict(ddp_options)})
    made = optimizer(model)
    compression = None if spec is None else ddp.compress(model, made, spec, **options)
    return model, made, compression


def trained(spec, steps=6, **options):
    """The model after some steps, and its compression."""
    model, optimizer, compression = wrapped(spec, **options)
    train(model, optimizer, batches(steps))
    assert_replicas_identical(model)
    return model, compression


def same_in_any_bucket(specs):
    """Those that add no floats, where ranks are three or more: in which order these are added up
    depends on their place in a bucket, as in DDP itself, which makes new buckets after a step.
    Small tensors travel densely, unless min_numel is 0."""
    return [spec for spec in specs if dist.get_world_size() == 2 or "min_numel=0" in spec]


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def everywhere(tensor):
    """A tensor of each rank, in rank order."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return torch.stack(found)


def assert_replicas_identical(model):
    mine = flat(model)
    assert torch.isfinite(mine).all(), "parameters are not finite"
    worst = (everywhere(mine) - mine).abs().max().item()
    assert worst == 0, f"replicas differ by {worst:.2e}"


def assert_close(model, reference, tolerance=1e-6):
    a, b = flat(model), flat(reference)
    error = ((a - b).abs().max() / b.abs().max()).item()
    assert error <= tolerance, f"parameters differ by {error:.2e} relative"
