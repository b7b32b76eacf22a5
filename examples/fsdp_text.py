"""Trains a small transformer on Python's manual, whose replicas fully_shard has cut, with any
compression between the replicas:

    torchrun --nproc_per_node 4 examples/fsdp_text.py --compression hsdp maxnorm updates

Ranks are two replicas of as many shards as there are ranks to each. Several are trained one after
the other, from the same seed: hsdp is FSDP's own reduction; updates is UpdateOptimizer with the
spec that is advised for Adam, one exchange for two steps; others are specs. --state saves a
checkpoint of them after training, which any number of ranks could go on from.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from horovod_compress import fsdp

REPLICAS, LENGTH, WIDTH, HELD_OUT = 2, 64, 128, 40_000


class Transformer(nn.Module):
    """Four blocks that look at earlier characters only: 0.8 million parameters."""

    def __init__(self, characters):
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(4)
        )
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, x):
        x = self.embedding(x) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.out(x)


def loss_of(model, codes, starts):
    x = torch.stack([codes[i : i + LENGTH + 1] for i in starts.tolist()])
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def train(spec, codes, options):
    torch.manual_seed(options.seed)
    shape = REPLICAS, dist.get_world_size() // REPLICAS
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = Transformer(int(codes.max()) + 1)
    over = mesh if spec == "hsdp" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    compression = None
    if spec == "updates":
        # A replica's part of the batch has more noise than the whole.
        own = fsdp.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, ranks=REPLICAS)
        optimizer = fsdp.UpdateOptimizer(
            own,
            named_parameters=model.named_parameters(),
            every=2,
            process_group=mesh["replicate"],
        )
        compression = optimizer.compression
    elif spec != "hsdp":
        compression = fsdp.compress(model, optimizer, spec, replicate_group=mesh["replicate"])
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)

    generator = torch.Generator().manual_seed(1000 * options.seed + dist.get_rank())
    started = time.perf_counter()
    for _ in range(options.steps):
        starts = torch.randint(
            len(codes) - HELD_OUT - LENGTH, (options.batch,), generator=generator
        )
        optimizer.zero_grad()
        loss_of(model, codes, starts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        held_out = torch.arange(len(codes) - HELD_OUT, len(codes) - LENGTH, LENGTH)
        loss = sum(loss_of(model, codes, part) * len(part) for part in held_out.split(50))
    if dist.get_rank() == 0:
        sent = f", {compression.stats()['bytes_sent'] / 1e6:.1f} MB sent" if compression else ""
        loss = loss.item() / len(held_out)
        print(f"{spec}: seed {options.seed}, loss {loss:.4f}, {seconds:.1f} s{sent}", flush=True)
    if options.state and compression is not None:
        state = {"model": model.state_dict(), "compression": compression.state_dict(portable=True)}
        dcp.save(state, checkpoint_id=f"{options.state}-{spec.replace(':', '-')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", nargs="+", default=["hsdp"], metavar="SPEC")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", help="what names of checkpoints begin with")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    codes = torch.unique(codes, return_inverse=True)[1]
    for spec in options.compression:
        train(spec, codes, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
