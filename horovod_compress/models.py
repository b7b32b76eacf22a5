"""Gradient shapes {name: shape} of known networks, in the order of layers: as in PyTorch, or in Keras where the name says so."""
from typing import Dict, Tuple

Shape = Tuple[int, ...]
Shapes = Dict[str, Shape]


def resnet50() -> Shapes:
    """ResNet-50: 161 parameters, 25 557 032 floats (He et al., arXiv 1512.03385)."""
    shapes: Shapes = {}

    def convolution(name: str, out: int, into: int, size: int) -> None:
        shapes[f"{name}.weight"] = (out, into, size, size)

    def normalization(name: str, channels: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (channels,)

    convolution("conv1", 64, 3, 7)
    normalization("bn1", 64)
    into = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for i, (out, source, size) in enumerate([(width, into, 1), (width, width, 3), (4 * width, width, 1)], 1):
                convolution(f"{name}.conv{i}", out, source, size)
                normalization(f"{name}.bn{i}", out)
            if block == 0:
                convolution(f"{name}.downsample.0", 4 * width, into, 1)
                normalization(f"{name}.downsample.1", 4 * width)
            into = 4 * width
    shapes["fc.weight"], shapes["fc.bias"] = (1000, 2048), (1000,)
    return shapes


def mobilenetv2() -> Shapes:
    """MobileNetV2: 158 parameters, 3 504 872 floats (Sandler et al., arXiv 1801.04381)."""
    shapes: Shapes = {}

    def convolution(name: str, out: int, into: int, size: int) -> None:  # with the normalization that follows
        shapes[f"{name}.0.weight"] = (out, into, size, size)
        shapes[f"{name}.1.weight"] = shapes[f"{name}.1.bias"] = (out,)

    convolution("features.0", 32, 3, 3)
    into, block = 32, 0
    for expansion, out, blocks in [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]:
        for _ in range(blocks):
            block, width = block + 1, expansion * into
            if expansion > 1:
                convolution(f"features.{block}.expand", width, into, 1)
            convolution(f"features.{block}.depthwise", width, 1, 3)
            convolution(f"features.{block}.project", out, width, 1)
            into = out
    convolution("features.18", 1280, 320, 1)
    shapes["classifier.weight"], shapes["classifier.bias"] = (1000, 1280), (1000,)
    return shapes


def keras_resnet50() -> Shapes:
    """ResNet-50 as Keras has it, with biases in convolutions: 214 parameters, 25 583 592 floats."""
    shapes: Shapes = {}
    for name, shape in resnet50().items():
        shapes[name] = _in_keras(shape)
        if len(shape) == 4:
            shapes[name.replace("weight", "bias")] = shape[:1]
    return shapes


def keras_mobilenetv2() -> Shapes:
    """MobileNetV2 as Keras has it."""
    return {name: _in_keras(shape) for name, shape in mobilenetv2().items()}


def _in_keras(shape: Shape) -> Shape:
    """A kernel's shape in Keras: extents in space first, outputs last. A depthwise convolution has outputs of each channel last."""
    if len(shape) < 2:
        return shape
    out, into, *space = shape
    return (*space, out, 1) if space and into == 1 else (*space, into, out)


def vgg16() -> Shapes:
    """VGG-16: 32 parameters, 138 357 544 floats (Simonyan and Zisserman, arXiv 1409.1556)."""
    shapes: Shapes = {}
    into, index = 3, 0
    for width, convolutions in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(convolutions):
            shapes[f"features.{index}.weight"], shapes[f"features.{index}.bias"] = (width, into, 3, 3), (width,)
            into, index = width, index + 2  # a ReLU follows
        index += 1  # and a pooling
    for index, (out, into) in {0: (4096, 512 * 7 * 7), 3: (4096, 4096), 6: (1000, 4096)}.items():
        shapes[f"classifier.{index}.weight"], shapes[f"classifier.{index}.bias"] = (out, into), (out,)
    return shapes


def lstm(words: int = 10000, width: int = 1500) -> Shapes:
    """A language model of two LSTM layers on the Penn Treebank, with an untied decoder: 11 parameters, 66 034 000 floats
    (Zaremba et al., arXiv 1409.2329)."""
    shapes: Shapes = {"encoder.weight": (words, width)}
    for layer in range(2):
        for part in ("ih", "hh"):  # of input and of hidden state, four gates each
            shapes[f"rnn.weight_{part}_l{layer}"] = (4 * width, width)
            shapes[f"rnn.bias_{part}_l{layer}"] = (4 * width,)
    shapes["decoder.weight"], shapes["decoder.bias"] = (words, width), (words,)
    return shapes


def bert(width: int = 768, inner: int = 3072) -> Shapes:
    """BERT-base with its pooler: 199 parameters, 109 482 240 floats (Devlin et al., arXiv 1810.04805)."""
    shapes: Shapes = {}

    def linear(name: str, out: int, into: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, into), (out,)

    def normalization(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    for name, rows in {"word": 30522, "position": 512, "token_type": 2}.items():
        shapes[f"embeddings.{name}_embeddings.weight"] = (rows, width)
    normalization("embeddings.LayerNorm")
    for layer in range(12):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{name}.attention.{part}", width, width)
        normalization(f"{name}.attention.output.LayerNorm")
        linear(f"{name}.intermediate.dense", inner, width)
        linear(f"{name}.output.dense", width, inner)
        normalization(f"{name}.output.LayerNorm")
    linear("pooler.dense", width, width)
    return shapes


MODELS = {
    "resnet50": resnet50, "mobilenetv2": mobilenetv2, "vgg16": vgg16, "lstm": lstm, "bert": bert,
    "keras-resnet50": keras_resnet50, "keras-mobilenetv2": keras_mobilenetv2,
}
