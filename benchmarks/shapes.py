"""Gradient shapes of known networks, in the order of their layers."""


def resnet50():
    """{name: shape} of ResNet-50's 161 parameters, 25 557 032 floats (He et al., arXiv 1512.03385)."""
    shapes = {}

    def convolution(name, out, into, size):
        shapes[f"{name}.weight"] = (out, into, size, size)

    def normalization(name, channels):
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
