"""A model, data that differs between ranks, and a training loop as users write it: what cases in
PyTorch share."""

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvdc


def start():
    """The rank, ready to run cases."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    return hvd.rank()


# The dense limit: the same trajectory as plain Horovod.
DENSE = "dgc:ratio=1,masking=false"


class Net(nn.Module):
    """Convolution, normalization, a layer used twice, a frozen layer, a linear layer: 17 thousand
    parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
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


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for _ in range(steps):
        yield (
            torch.randn(8, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (8,), generator=generator),
        )


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def wrap(model, optimizer, compression, prefix="", **options):
    """prefix: of Horovod's names, where several models' gradients are on the way at once."""
    named = [(prefix + name, param) for name, param in model.named_parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=compression, **options
    )
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    return wrapped


def train(model, optimizer, data):
    for x, y in data:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def compressed(
    model, optimizer, steps=10, spec="dgc:ratio=0.01", wrap_options=None, process_set=None
):
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), process_set=process_set
    )
    train(model, wrap(model, optimizer, compression, **(wrap_options or {})), batches(steps))
    return compression


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def assert_replicas_identical(model, process_set=None):
    mine = flat(model)
    # Named: unnamed collectives are numbered, and ranks that are in other process sets have counted
    # further.
    options = {} if process_set is None else {"process_set": process_set}
    all_of_them = hvd.allgather(mine[None], name="replicas", **options)
    assert torch.isfinite(mine).all(), "parameters are not finite"
    worst = (all_of_them - all_of_them[0]).abs().max().item()
    assert worst == 0, f"replicas differ by {worst:.2e}"


def assert_close(model, reference, tolerance=1e-6):
    a, b = flat(model), flat(reference)
    error = ((a - b).abs().max() / b.abs().max()).item()
    assert error <= tolerance, f"parameters differ by {error:.2e} relative"
