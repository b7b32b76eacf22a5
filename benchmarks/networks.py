"""Networks of known kinds that benchmarks train, in sizes for two cores."""

import torch
import torch.nn.functional as F
from torch import nn

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
    """Layers that look at earlier characters only, normalized before attention: 0.6 million
    parameters with three. bias: of linear layers and of norms."""

    def __init__(self, length: int, width: int = 128, layers: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.position = (
            nn.Embedding(LETTERS, width),
            nn.Parameter(0.02 * torch.randn(length, width)),
        )
        layer = nn.TransformerEncoderLayer(
            width,
            4,
            4 * width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            activation="gelu",
            bias=bias,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width, bias=bias), enable_nested_tensor=False
        )
        self.out = nn.Linear(width, LETTERS, bias=bias)
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
