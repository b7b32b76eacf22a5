"""A model that fully_shard cuts, data that differs between ranks, and a training loop as users
write it: what cases under FSDP2 share."""

import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from horovod_compress import fsdp

DENSE = "dgc:ratio=1,masking=false,min_numel=0"
# Of most cases. Each has as many shards as there are ranks to it.
REPLICAS = 2


def start():
    """The rank, ready to run cases. Horovod cannot be imported in it."""
    assert "horovod" not in sys.modules
    sys.modules["horovod"] = None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return int(os.environ["RANK"])


class Block(nn.Module):
    """Attention, a matrix in two layers, a normalization."""

    def __init__(self, width=24):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    """A transformer with a convolution over time, tied words, a frozen layer, a scale of one
    element, and a layer that only some batches reach: 16 thousand parameters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.time = nn.Conv1d(24, 24, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.sometimes = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.words.weight

    def body(self, x, branch=1.0):
        """branch: a factor of a layer, None where it is not reached."""
        x = self.words(x)
        x = x + self.time(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        if branch is not None:
            x = x + branch * self.sometimes(x)
        return self.scale * self.frozen(x)

    def forward(self, x, branch=1.0):
        return self.head(self.body(x, branch))


@functools.lru_cache(maxsize=None)
def mesh_of(replicas):
    """All ranks: (replicas, shards)."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def cut(model, mesh, whole=False, **options):
    """fully_shard on each block and the rest, or on the model alone."""
    for block in () if whole else model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def model_of(cls=Net, seed=0):
    torch.manual_seed(seed)
    return cls()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sharded(spec, replicas=REPLICAS, optimizer=sgd, model=None, cutting=(), bound=True, **options):
    """(model, optimizer, compression) of replicas of shards; spec None: FSDP's own reduction.
    bound: whether the compression gets the optimizer."""
    mesh = mesh_of(replicas)
    over = mesh if spec is None else mesh["shard"]
    model = cut(model or model_of(), over, **dict(cutting))
    made = optimizer(model)
    if spec is None:
        return model, made, None
    given = made if bound else None
    compression = fsdp.compress(model, given, spec, replicate_group=mesh["replicate"], **options)
    return model, made, compression


def batches(steps, seed=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        yield torch.randint(0, 50, (4, 8), generator=generator)


def loss_of(model, x, branch=1.0):
    return nn.functional.cross_entropy(model(x[:, :-1], branch).flatten(0, 1), x[:, 1:].flatten())


def train(model, optimizer, data, clip=None, passes=1):
    for i, x in enumerate(data):
        if i % passes == 0:
            optimizer.zero_grad()
        loss_of(model, x).backward()
        if (i + 1) % passes == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def trained(spec, steps=6, clip=None, passes=1, **options):
    """The model after some steps, and its compression."""
    model, optimizer, compression = sharded(spec, **options)
    train(model, optimizer, batches(steps), clip, passes)
    return model, compression


def whole(model):
    """All parameters, from all shards."""
    return torch.cat([p.detach().full_tensor().double().flatten() for p in model.parameters()])


def assert_replicas_identical(model):
    mine = whole(model)
    assert torch.isfinite(mine).all(), "parameters are not finite"
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    worst = max((its - mine).abs().max().item() for its in found)
    assert worst == 0, f"replicas differ by {worst:.2e}"


def difference(model, reference):
    """Relative to the largest parameter."""
    a, b = whole(model), whole(reference)
    return ((a - b).abs().max() / b.abs().max()).item()


def assert_close(model, reference, tolerance=1e-6):
    error = difference(model, reference)
    assert error <= tolerance, f"parameters differ by {error:.2e} relative"


def modules_of(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
