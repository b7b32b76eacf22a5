"""What tests of kernels share: arguments of each kernel, drawn by a function of its name, and how
results are compared."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import strategies as st
from one_tensor import reference

from horovod_compress import kernels
from horovod_compress.kernels import HEADROOM, Encoded

native_only = pytest.mark.skipif(
    kernels.backend != "native", reason="compares native kernels, which were not built"
)

# Native kernels are there for several sets of instructions; what runs by itself is the last.
INSTRUCTIONS = kernels.native.available_instructions() if kernels.backend == "native" else []


@contextlib.contextmanager
def using(instructions):
    kernels.native.use_instructions(instructions)
    try:
        yield
    finally:
        kernels.native.use_instructions(INSTRUCTIONS[-1])


# Around vector lengths, blocks of 64 words, and some whole tensors.
sizes = st.one_of(st.integers(0, 70), st.sampled_from([255, 1000, 1023, 1024, 1025, 4097, 30_000]))
KEYS = st.integers(0, 2**64 - 1)
VALUES = ("fp32", "fp16", "bf16", "sign", "power", "2bit")
SPECIAL = np.float32(
    [0, -0.0, 1, -1, 1e-45, -1e-39, 2**-126, 65504, 65520, 1e30, 3.4028235e38, -3.4028235e38]
)


class Arguments:
    """Draws what kernels take."""

    def __init__(self, data):
        self.draw = data.draw
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        self.size = data.draw(sizes)
        self.unit = 2.0 ** self.one_of(-130, -10, 0, 100)

    def one_of(self, *choices):
        return self.draw(st.sampled_from(choices))

    def bits(self, dtype, size=None):
        info = np.iinfo(dtype)
        return self.rng.integers(
            info.min, info.max, self.size if size is None else size, dtype, endpoint=True
        )

    def finite(self, size=None):
        size = self.size if size is None else size
        style = self.one_of("normal", "12 orders", "sparse", "ties", "special", "bits")
        x = self.rng.standard_normal(size)
        if style == "12 orders":
            x = x * 10.0 ** self.rng.uniform(-6, 6, size)
        elif style == "sparse":
            x = x * (self.rng.random(size) < 0.05)
        elif style == "ties":
            x = self.rng.integers(-3, 4, size) / 2
        elif style == "special":
            x = self.rng.choice(SPECIAL, size)
        elif style == "bits":
            x = np.nan_to_num(self.bits(np.uint32, size).view(np.float32))
        return x.astype(np.float32)

    def any(self):
        """Among them what is not finite, sometimes."""
        x = self.finite()
        if self.size and self.one_of(False, False, True):
            x[self.rng.integers(0, self.size, 3)] = self.rng.choice([np.nan, np.inf, -np.inf], 3)
        return x

    def exact(self):
        """Values whose sums, in whatever order, are exact."""
        return (self.rng.integers(-1000, 1001, self.size) * self.unit).astype(np.float32)

    def indices(self):
        return np.flatnonzero(self.rng.random(self.size) < self.one_of(0.0, 0.01, 0.3, 1.0)).astype(
            np.uint32
        )

    def scale(self):
        return self.one_of(1.0, 0.5, 1 / 3, -1.0)

    def words(self, count, width, spare, more=0):
        """Any words at all, as many as `count` fields need."""
        fields, words, dtype = reference.quantization.shape_of(count, width, spare)
        return self.bits(np.dtype(dtype.str.replace("u", "i")), words + more)

    def sparse_body(self):
        at = self.indices()
        kind = self.one_of(*VALUES)
        values, scales = reference.sparse.code_values(self.finite(len(at)), kind)
        return body_of(reference.encode_sparse(at, values, kind=kind, scales=scales))

    def steps(self, scales):
        return [
            2.0**bits - 1
            for bits in sorted(self.rng.choice(np.arange(1, 17), scales, replace=False).tolist())
        ]

    def w(self):
        return np.float32([self.one_of(0.0, 1e-42, 1e-20, 0.37, 1.0, 1e20, 3.4e38, np.inf)])

    def levels(self, scales, size, own=None):
        """Words of counts of up to `size`, often as many, if this rank's `own` say so too; None for
        a single scale."""
        width, counts = size.bit_length(), []
        for its in np.split(own, scales - 1) if own is not None else [None] * (scales - 1):
            fits = 1 if its is None else reference.quantization.unpack(its, self.size, width, 1, 0)
            others = np.where(
                self.rng.random(self.size) < 0.5, size - 1, self.rng.integers(0, size, self.size)
            )
            counts.append(reference.quantization.pack(others + fits, width, 1))
        return np.concatenate(counts) if counts else None


def body_of(encoded):
    return encoded.buffer[HEADROOM:-1]


# The arguments of each kernel, by name.


def take_entries(a):
    kind, masked = a.one_of(*VALUES), a.one_of(0, a.size // 2, a.size)
    return dict(
        indices=a.indices(), v=a.finite(), u=a.one_of(None, a.finite()), kind=kind, masked=masked
    )


def scatter_add(a):
    indices = a.indices()
    return dict(out=a.finite(), indices=indices, values=a.any()[: len(indices)], scale=a.scale())


def decode_add_sparse(a):
    return dict(out=a.finite(), body=a.sparse_body(), scale=a.scale())


def decode_sparse(a):
    return dict(body=a.sparse_body(), numel=a.size)


def chunks(a):
    """A grid of chunks, and as many elements as it has."""
    h, w, down, across = (int(a.rng.integers(1, most)) for most in (20, 40, 4, 4))
    a.size = h * w * down * across
    return dict(rows=a.finite(h * h) % 1, columns=a.finite(w * w) % 1, width=w * across), h * w


def encode_dct(a):
    grid, size = chunks(a)
    return dict(
        grad=a.any(),
        residual=a.finite(),
        **grid,
        k=int(a.rng.integers(0, size + 1)),
        decay=a.one_of(0.0, 0.999, 1.0),
        scale=a.one_of(1.0, 0.5),
        kind=a.one_of(*VALUES),
    )


def decode_add_dct(a):
    grid, _ = chunks(a)
    return dict(out=a.finite(), body=a.sparse_body(), **grid, scale=a.scale())


def encode_strom(a):
    return dict(grad=a.any(), residual=a.finite(), tau=a.one_of(1e-3, 0.5, 1e10))


def encode_variance(a):
    squares = a.one_of(None, np.abs(a.any()))
    return dict(
        grad=a.any(),
        squares=squares,
        r=a.finite(),
        v=np.abs(a.finite()),
        alpha=a.one_of(0.1, 1.0, 1.5, 2.0),
        zeta=a.one_of(0.0, 0.999, 1.0),
        tau=a.one_of(0.0, 0.0, 1e-3, 0.5),
        error_feedback=a.one_of(False, True),
    )


def encode_adacomp(a):
    return dict(
        grad=a.exact(),
        residual=a.exact(),
        sent=a.indices(),
        sent_scale=a.one_of(0.0, 3 * a.unit),
        bin_length=a.one_of(1, 2, 15, 16, 17, 50, 500, 10**6),
        scale_factor=a.one_of(1.0, 2.0, 3.5),
    )


def encode_float16(a):
    return dict(x=a.any(), half=a.bits(np.uint16))


def decode_float16(a):
    return dict(half=a.bits(np.uint16), out=a.finite())


def encode_bf16(a):
    return dict(grad=a.any())


def decode_add_bf16(a):
    return dict(out=a.finite(), body=body_of(reference.encode_bf16(a.finite())), scale=a.scale())


def encode_one_bit(a):
    return dict(
        grad=a.exact(),
        residual=a.exact(),
        growth=a.one_of(1.0, 0.0, 0.5, 2.0),
        symmetric=a.one_of(False, True),
    )


def decode_add_one_bit(a):
    words = -(-a.size // 32)
    body = struct.pack("<2f", *a.finite(2)) + a.bits(np.int32, words).tobytes()
    return dict(out=a.finite(), body=np.frombuffer(body, np.uint8), scale=a.scale())


def encode_natural(a):
    return dict(grad=a.any(), key=a.draw(KEYS))


def decode_add_natural(a):
    return dict(
        out=a.finite(),
        body=body_of(reference.encode_natural(a.finite(), key=a.draw(KEYS))),
        scale=a.scale(),
    )


def buckets(a):
    bucket = a.one_of(1, 2, 15) if a.size <= 70 else a.one_of(16, 17, 512, 100_000)
    return dict(steps=a.one_of(1, 3, 15, 255, 32767), bucket=bucket)


def encode_buckets(a):
    return dict(
        grad=a.any(), **buckets(a), l2=False, limit=a.one_of(0.0, 0.5, 1.0), key=a.draw(KEYS)
    )


def decode_add_buckets(a):
    options = buckets(a)
    l2, limit = a.one_of(False, True), a.one_of(0.0, 1.0)
    encoded = reference.encode_buckets(a.finite(), **options, l2=l2, limit=limit, key=1)
    return dict(out=a.finite(), body=body_of(encoded), **options, scale=a.scale())


def apply_momentum(a):
    momentum, nesterov = a.one_of(0.0, 0.9), a.one_of(False, True)
    return dict(out=a.any(), u=a.finite(), new_u=a.finite(), momentum=momentum, nesterov=nesterov)


def move(a):
    return dict(x=a.any(), out=a.finite(), scale=a.scale())


def add_up(a):
    return dict(out=a.finite(), parts=[a.any() for _ in range(a.one_of(1, 2, 4))])


HEADER = dict(number=7, digest=2**32 - 1, step=3)


def frame(a, tensors, **header):
    sizes = [a.one_of(0, 70, 4097) for _ in range(tensors)]
    bodies = [a.bits(np.uint8, size + 1) for size in sizes]
    needed = HEADROOM + reference.frames.table_size(tensors) + sum(sizes)
    return dict(
        buffers=[np.append(np.zeros(HEADROOM, np.uint8), body) for body in bodies],
        size=needed + a.one_of(0, 1, 2, 70),
        finite=[a.one_of(True, False) for _ in range(tensors)],
        **(header or HEADER),
    )


def seal_frame(a):
    return frame(
        a, a.one_of(1, 2, 5), number=a.one_of(0, 255), digest=5, step=a.one_of(0, 2**32 - 1)
    )


def open_frames(a):
    frames, tensors = a.one_of(1, 3), a.one_of(1, 2, 5)
    made = [
        {**frame(a, tensors), "digest": HEADER["digest"] + i & 0xFFFFFFFF} for i in range(frames)
    ]
    sealed = [reference.seal_frame(**each) for each in made]
    return dict(data=np.concatenate(sealed), frames=frames, tensors=tensors, **HEADER)


def max_abs(a):
    return dict(x=a.any())


def norms(a):
    l2, peaks = a.one_of(False, True), a.one_of(None, a.bits(np.uint32, -(-a.size // 64)))
    return dict(x=a.exact() if l2 else a.any(), peaks=peaks, l2=l2)


def squared_norm(a):
    return dict(x=a.exact())


def random_bits(a):
    return dict(key=a.draw(KEYS), n=a.size)


def draw_coordinates(a):
    first = int(a.rng.integers(0, a.size + 1))
    return dict(
        key=a.draw(KEYS),
        numel=a.size,
        first=first,
        count=int(a.rng.integers(0, a.size - first + 1)),
    )


def quantize(a):
    scales, size = a.one_of(1, 1, 2, 3, 8), a.one_of(1, 2, 3, 8, 1000)
    steps, x, w, levels = a.steps(scales), a.finite(), a.w(), None
    width = (2 * size * int(steps[0])).bit_length()
    if scales > 1:
        peaks = np.empty(-(-a.size // 64), np.uint32)
        w = reference.norms(x, peaks, l2=False) * np.float64(a.one_of(1, 1.7))
        w = np.minimum(w, np.finfo(np.float32).max).astype(np.float32)
        levels = a.levels(
            scales, size, reference.encode_scales(x, peaks, w=w, steps=steps, size=size)
        )
    largest = float(np.finfo(np.float32).max)
    clip = min(a.one_of(0.0, 1 / 3, 1.0, 2.0) * min(float(w[0]), largest), largest)
    return dict(
        x=x, levels=levels, w=w, clip=clip, steps=steps, width=width, size=size, key=a.draw(KEYS)
    )


def dequantize(a):
    scales, size = a.one_of(1, 1, 2, 3, 8), a.one_of(1, 2, 3, 8, 1000)
    steps = a.steps(scales)
    width = (2 * size * int(steps[0])).bit_length()
    words, levels = a.words(a.size, width, 0), a.levels(scales, size)
    scaled = dict(w=a.w(), steps=steps, width=width, size=size, scale=a.scale())
    return dict(words=words, levels=levels, out=a.finite(), **scaled)


def encode_scales(a):
    x, peaks = a.any(), np.empty(-(-a.size // 64), np.uint32)
    reference.norms(x, peaks, l2=False)
    return dict(
        x=x, peaks=peaks, w=a.w(), steps=a.steps(a.one_of(2, 3, 8)), size=a.one_of(1, 2, 3, 8, 1000)
    )


def encode_signs(a):
    return dict(x=a.finite(), width=a.one_of(2, 3, 5, 11))


def decode_signs(a):
    size = a.one_of(1, 2, 3, 8, 1000)
    width = (2 * size).bit_length()
    return dict(
        words=a.words(a.size, width, 0, more=1),
        out=a.finite(),
        width=width,
        size=size,
        unit=a.scale(),
    )


ELSEWHERE = {
    # Have a choice, of what they send or how they round, or compute nothing.
    "add_to_residual",
    "encode_sparse",
    "encode_topk",
    "flush_denormals",
    "orthonormalize",
    "product",
    "project",
    "project_back",
    "max_abs_and_deviation",
    "subtract_product",
}
KERNELS = [name for name in reference.__all__ if name not in ELSEWHERE]


def trimmed(encoded):
    """Without the memory that the buffer is a view of."""
    return encoded._replace(undo=())


# Of these a body says nothing where the gradient was not finite.
BODIES = ("encode_bf16", "encode_buckets", "encode_natural")


def assert_same(mine, its):
    assert isinstance(mine, Encoded) == isinstance(its, Encoded)
    if isinstance(its, (tuple, list)):
        assert len(mine) == len(its)
        for pair in zip(mine, its):
            assert_same(*pair)
    elif isinstance(its, np.ndarray):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)
    else:
        assert mine == its
