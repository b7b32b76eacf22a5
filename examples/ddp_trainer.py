"""Trains a small vision transformer with Hugging Face's Trainer and any compression:

    torchrun --nproc_per_node 2 examples/ddp_trainer.py --compression maxnorm:bits=4

Several are trained one after the other, from the same seed; plain is DDP without a compression.
Needs transformers, accelerate and scikit-learn.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers as hf
from images import digits

from horovod_compress import ddp


class Compress(hf.TrainerCallback):
    """Compresses what the Trainer's model exchanges, once that is made for DDP."""

    def __init__(self, trainer, spec):
        self.trainer, self.spec, self.compression = trainer, spec, None

    def on_train_begin(self, *_, **__):
        # A second train() goes on with the model and the optimizer of the first.
        if self.compression is None:
            model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
            self.compression = ddp.compress(model, optimizer, self.spec)


def examples(images, labels):
    # In `digits` each pixel is there three times each way.
    pixels = torch.from_numpy(images[..., ::3, ::3])
    return [{"pixel_values": its, "labels": int(label)} for its, label in zip(pixels, labels)]


def accuracy(found):
    return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}


def train(spec, data, options, folder):
    hf.set_seed(options.seed)
    sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.ViTConfig(hidden_size=64, intermediate_size=128, **sizes, **layers)
    arguments = hf.TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        warmup_steps=50,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    model = hf.ViTForImageClassification(config)
    trainer = hf.Trainer(model, arguments, None, *data, compute_metrics=accuracy)
    compress = None if spec == "plain" else Compress(trainer, spec)
    if compress:
        trainer.add_callback(compress)
    trainer.train()
    found = 100 * trainer.evaluate()["eval_accuracy"]
    sent = f", {compress.compression.stats()['bytes_sent'] / 1e6:.2f} MB sent" if compress else ""
    if trainer.is_world_process_zero():
        print(f"{spec}: seed {options.seed}, {found:.2f} %{sent}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", nargs="+", default=["plain"], metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = [examples(*part) for part in digits().values()]
    with tempfile.TemporaryDirectory() as folder:
        for spec in options.compression:
            train(spec, data, options, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
