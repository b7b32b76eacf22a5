"""Gradients that are told, for what PyTorch and TensorFlow must make alike of them."""

import numpy as np

from horovod_compress import simulate

SHAPES = {"matrix": (40, 50), "kernel": (8, 6, 3, 3), "wide": (3, 900), "bias": (40,)}
SPECS = (
    "none",
    "fp16",
    "bf16",
    "topk",
    "randomk",
    "globalrandk",
    "dgc:momentum=0.9",
    "adacomp",
    "variance",
    "strom",
    "qsgd",
    "maxnorm",
    "multiscale",
    "terngrad",
    "signsgd",
    "efsignsgd",
    "onebit",
    "natural",
    "powersgd",
    "dgc:momentum=0.5,nesterov=true,dense=fp16",
    "dgc:momentum=0.9,warmup_steps=4",
    "powersgd:start_step=2",
    "multiscale:bits=2+4+8",
    "maxnorm:bits=16",
    "maxnorm:ratio=0.1",
    "demo:chunk=16,k=8",
    "topk:chunk=64,k=4,values=2bit",
    "dgc:momentum=0.9,values=sign",
    "dgc:momentum=0.9,dense=int8",
)
STEPS = 5


def gradients(rank, step):
    """Of one step on one rank: known to all ranks."""
    generator = np.random.default_rng((rank, step))
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def sent_of_tensors(compression):
    """Bytes of all tensors' carriers and frames, whatever transports and comparisons of ranks
    add."""
    return sum(each["bytes_sent"] for each in compression.stats_by_tensor().values())


def assert_simulated(spec, rank, size, results, sent):
    """That a rank has what `simulate` gives, to the last bit and to the byte. So what every
    framework gives is the same. results[step][name]; sent: bytes of all steps."""
    every = range(size)
    expected = simulate(spec, [[gradients(each, s) for each in every] for s in range(STEPS)])
    for step, (found, means) in enumerate(zip(results, expected.mean)):
        for name, mean in means.items():
            assert np.array_equal(found[name], mean), f"{spec}: {name} differs in step {step}"
    assert len(results) == STEPS
    assert sent == sum(of_ranks[rank] for of_ranks in expected.bytes_sent), f"{spec}: bytes"


def cyclic_means(every, size):
    """What examples/compressor makes of them: for each step {name: the mean over ranks}, of tensors
    that it does not leave dense."""
    residuals = {
        name: np.zeros((size, np.prod(SHAPES[name])), np.float32) for name in ("matrix", "wide")
    }
    for step in range(STEPS):
        means = {}
        for name, residual in residuals.items():
            residual += [gradients(rank, step)[name].ravel() for rank in range(size)]
            mean = means[name] = np.zeros(SHAPES[name], np.float32)
            mean.reshape(-1)[step % every :: every] = residual[:, step % every :: every].mean(0)
            residual[:, step % every :: every] = 0
        yield means


def adams_moments(gradients, betas, ranks):
    """Adam's moments for a series of gradients, both without the correction of their bias. ranks:
    those of hvdc.AdamW, with as many."""
    m = v = q = 0.0
    for t, g in enumerate(gradients, 1):
        q = (
            betas[1] * q + (1 - betas[1]) * g * m / (1 - betas[0] ** (t - 1))
            if t > 1
            else (1 - betas[1]) * g * g
        )
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        yield m, v / ranks + (1 - 1 / ranks) * np.maximum(q, 0)
