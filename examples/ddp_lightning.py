"""Trains a small network on handwritten digits with Lightning, and any compression:

    torchrun --nproc_per_node 2 examples/ddp_lightning.py --compression dgc:ratio=0.01

Several are trained one after the other, from the same seed; plain is DDP without a compression.
Needs lightning and scikit-learn.
"""

import argparse
import os

import torch
import torch.distributed as dist
from ddp_images import network
from images import digits
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horovod_compress import ddp


class Digits(LightningModule):
    """hook: the state and the hook that the strategy has, too."""

    def __init__(self, hook, lr):
        super().__init__()
        self.network, self.hook, self.lr = network(24), hook, lr

    def on_train_start(self):
        # Lightning itself registers hooks on GPUs only.
        if self.hook and self.device.type == "cpu":
            self.trainer.strategy.model.register_comm_hook(*self.hook)

    def training_step(self, batch, _):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        right = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        """SGD, whose rate rises over the first twentieth of all steps, then falls to zero."""
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, weight_decay=1e-4)
        steps = self.trainer.estimated_stepping_batches
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (0.05 * steps), 1) * (1 - step / steps)
        )
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


def train(spec, data, options):
    seed_everything(options.seed, verbose=False)
    state, hook = (None, None) if spec == "plain" else ddp.comm_hook(spec)
    trainer = Trainer(
        strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=options.epochs,
        check_val_every_n_epoch=options.epochs,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        enable_model_summary=False,
    )
    model = Digits(hook and (state, hook), options.lr)
    trainer.fit(model, *data)
    sent = f", {state.stats()['bytes_sent'] / 1e6:.2f} MB sent" if state else ""
    if trainer.is_global_zero:
        accuracy = 100 * float(trainer.callback_metrics["accuracy"])
        print(f"{spec}: seed {options.seed}, {accuracy:.2f} %{sent}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", nargs="+", default=["plain"], metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parts = {part: TensorDataset(*map(torch.from_numpy, its)) for part, its in digits().items()}
    data = DataLoader(parts["train"], 32, shuffle=True), DataLoader(parts["test"], 397)
    for spec in options.compression:
        train(spec, data, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
