"""Gradient shapes {name: shape} of known networks, in the order of layers, as in PyTorch."""

from typing import Dict, Tuple

Shape = Tuple[int, ...]
Shapes = Dict[str, Shape]


def _layer(name: str, *shape: int) -> Shapes:
    """Weights of that shape, and a bias for each of the outputs, which come first. A normalization
    has the shape (channels,)."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _convolution(name: str, normalization: str, out: int, into: int, size: int) -> Shapes:
    """A convolution without a bias, and the normalization that follows."""
    return {f"{name}.weight": (out, into, size, size), **_layer(normalization, out)}


def resnet50() -> Shapes:
    """ResNet-50: 161 parameters, 25 557 032 floats (He et al., arXiv 1512.03385)."""
    shapes, into = _convolution("conv1", "bn1", 64, 3, 7), 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for i, (out, source, size) in enumerate(
                [(width, into, 1), (width, width, 3), (4 * width, width, 1)], 1
            ):
                shapes.update(_convolution(f"{name}.conv{i}", f"{name}.bn{i}", out, source, size))
            if block == 0:
                shapes.update(
                    _convolution(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, into, 1)
                )
            into = 4 * width
    return {**shapes, **_layer("fc", 1000, 2048)}


def mobilenetv2() -> Shapes:
    """MobileNetV2: 158 parameters, 3 504 872 floats (Sandler et al., arXiv 1801.04381)."""
    layers, into, block = [("0", 32, 3, 3)], 32, 0  # (name, outputs, inputs, size)
    for expansion, out, blocks in [
        (1, 16, 1),
        (6, 24, 2),
        (6, 32, 3),
        (6, 64, 4),
        (6, 96, 3),
        (6, 160, 3),
        (6, 320, 1),
    ]:
        for _ in range(blocks):
            block, width = block + 1, expansion * into
            layers += [(f"{block}.expand", width, into, 1)] if expansion > 1 else []
            layers += [(f"{block}.depthwise", width, 1, 3), (f"{block}.project", out, width, 1)]
            into = out
    shapes: Shapes = {}
    for name, *shape in [*layers, ("18", 1280, 320, 1)]:
        shapes.update(_convolution(f"features.{name}.0", f"features.{name}.1", *shape))
    return {**shapes, **_layer("classifier", 1000, 1280)}


def vgg16() -> Shapes:
    """VGG-16: 32 parameters, 138 357 544 floats (Simonyan and Zisserman, arXiv 1409.1556)."""
    shapes: Shapes = {}
    into, index = 3, 0
    for width, convolutions in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(convolutions):
            shapes.update(_layer(f"features.{index}", width, into, 3, 3))
            into, index = width, index + 2  # a ReLU follows
        index += 1  # and a pooling
    return {
        **shapes,
        **_layer("classifier.0", 4096, 512 * 7 * 7),
        **_layer("classifier.3", 4096, 4096),
        **_layer("classifier.6", 1000, 4096),
    }


def lstm(words: int = 10000, width: int = 1500) -> Shapes:
    """A language model of two LSTM layers on the Penn Treebank, with an untied decoder: 11
    parameters, 66 034 000 floats (Zaremba et al., arXiv 1409.2329)."""
    shapes: Shapes = {"encoder.weight": (words, width)}
    # Of input and of hidden state, four gates each.
    for part in ("ih_l0", "hh_l0", "ih_l1", "hh_l1"):
        shapes[f"rnn.weight_{part}"], shapes[f"rnn.bias_{part}"] = (4 * width, width), (4 * width,)
    return {**shapes, **_layer("decoder", words, width)}


def bert(width: int = 768, inner: int = 3072) -> Shapes:
    """BERT-base with its pooler: 199 parameters, 109 482 240 floats (Devlin et al., arXiv
    1810.04805)."""
    rows = {"word": 30522, "position": 512, "token_type": 2}
    shapes: Shapes = {
        f"embeddings.{name}_embeddings.weight": (count, width) for name, count in rows.items()
    }
    shapes.update(_layer("embeddings.LayerNorm", width))
    for layer in range(12):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes.update(_layer(f"{name}.attention.{part}", width, width))
        shapes.update(
            {
                **_layer(f"{name}.attention.output.LayerNorm", width),
                **_layer(f"{name}.intermediate.dense", inner, width),
                **_layer(f"{name}.output.dense", width, inner),
                **_layer(f"{name}.output.LayerNorm", width),
            }
        )
    return {**shapes, **_layer("pooler.dense", width, width)}


MODELS = {model.__name__: model for model in (resnet50, mobilenetv2, vgg16, lstm, bert)}
