"""The compression to start with: one recommendation a situation, and how far it was measured."""

from typing import NamedTuple, Optional


class Advice(NamedTuple):
    """A recommendation.

    Attributes:
        situation: when it is the one.
        spec: of the compression.
        measured: where training ended, against none; ± is the 95 % interval of the difference.
        every: local steps of each exchange, where updates are compressed, by `UpdateOptimizer`;
            None where gradients are.
        besides: what else to do.
    """

    situation: str
    spec: str
    measured: str
    every: Optional[int] = None
    besides: str = ""

    @property
    def use(self) -> str:
        """The argument to write, as Markdown."""
        if self.every is None:
            use = f"`{self.spec}`"
        else:
            use = f'`UpdateOptimizer(…, compression="{self.spec}", every={self.every})`'
        return f"{use}, {self.besides}" if self.besides else use


SGD = Advice(
    "SGD, a slow link (1 Gbit/s and less), many parameters",
    "dgc:ratio=0.001",
    "+0.00 ± 0.20 points (images), +0.13 ± 0.59 and −0.29 ± 0.43 (ResNet-20 on 2 and 8 ranks), "
    "−1.4 ± 0.4 and −0.9 ± 1.2 (MNIST, 400 steps, on 2 and 8 ranks, held out)",
    besides="with `warmup_steps=` a tenth of the steps",
)
ADAM = Advice(
    "Adam, AdamW and their kin, 2 ranks",
    "adacomp:bin_length=64,dense=fp16",
    "−0.2 ± 3.2 % (LSTM), −0.2 ± 0.9 % (transformer), +0.7 ± 1.0 % (GRU, held out), −0.5 ± 1.7 % "
    "(decoder, held out)",
    every=4,
    besides="and try 1.5 to 4 times the learning rate",
)
ADVICE = (
    SGD,
    Advice(
        "SGD, few steps in all, as in fine-tuning",
        "dgc:ratio=0.01",
        "+0.08 ± 0.37 points (digits, 300 steps), +0.41 ± 0.11 with a warm-up (the demo)",
    ),
    SGD._replace(
        situation="SGD, several ranks on each machine",
        spec="dgc:ratio=0.001,hosts=true",
        measured="−0.18 ± 0.17 and +0.02 ± 0.37 points to without `hosts` (images, 8 and 16 ranks)",
    ),
    SGD._replace(
        situation="SGD in PyTorch, many ranks, each on a machine of its own",
        spec="dgc:ratio=0.001,exchange=split",
        measured="−0.25 ± 0.22 and −0.21 ± 0.34 points to gathering (images, 8 and 16 ranks)",
    ),
    ADAM,
    ADAM._replace(
        situation="Adam, AdamW and their kin, more ranks",
        measured="+0.0 ± 1.5 % (GRU, 8 ranks, held out), +0.3 ± 2.0 % (decoder, 8 ranks); with "
        "`every=4` −1.3 ± 0.8 % and +8.0 ± 1.4 %",
        every=2,
    ),
    Advice(
        "A library takes the steps of Adam itself, or no state is to be kept",
        "maxnorm:bits=4",
        "−0.08 ± 0.34 points (digits, SGD), +0.08 ± 0.95 (a vision transformer, AdamW)",
    ),
    Advice(
        "Nothing is to be tuned: a third of the bytes on 2 ranks",
        "maxnorm:bits=8",
        "+0.0019 ± 0.0029 of the loss (a transformer, AdamW, held out), +0.08 ± 0.97 points "
        "(digits, SGD)",
    ),
    Advice(
        "SGD, fewer bytes on an allreduce",
        "powersgd:rank=2",
        "+0.08 ± 0.51 points (digits)",
    ),
    Advice("Half of the bytes are enough", "fp16", "−0.2 ± 1.1 points (digits)"),
)
