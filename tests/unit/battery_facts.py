"""What is true of each algorithm, and what the tests that every id of available() goes through
share."""

import dataclasses
import math

import numpy as np
import pytest

import horovod_compress as hc
from horovod_compress.compressors.state import State

# Gradients here are huge and not finite too.
quiet = pytest.mark.filterwarnings(
    "ignore:overflow encountered",
    "ignore:invalid value encountered",
    "ignore:horovod_compress. .* infinite in float16",
)


@dataclasses.dataclass
class Facts:
    """What is true of one id. Options are spec strings; every tensor is compressed, whatever its
    size, unless they say otherwise.

    variants: options under which it does something worth testing on some hundred elements;
    conserves: options under which what was sent and the residuals add up to all gradients; rounds:
    to float32 rounding of "elements", or of the tensor as a whole; dense: options under which the
    result is the mean gradient, to `dense_error`; unbiased: options under which it is on average,
    with the largest variance of one rank's result, a function of the
        gradient;
    drawn: "own" random choices on each rank, "shared" ones, or neither; scales: the largest power
    of two that a gradient can be multiplied by and the result is just multiplied too;
    """

    variants: tuple = ("",)
    conserves: tuple = ()
    rounds: str = "tensor"
    dense: tuple = ()
    dense_error: float = 2e-6
    unbiased: dict = dataclasses.field(default_factory=dict)
    drawn: str = None
    scales: int = 60


def at_most(steps):
    """Variance of rounding to one of `steps` parts of the largest element."""
    return lambda g: np.abs(g).max() ** 2 / (4 * steps**2)


def any_variance(g):
    return math.inf


FACTS = {
    "none": Facts(dense=("",)),
    "fp16": Facts(dense=("",), dense_error=2**-9, scales=0),
    "bf16": Facts(dense=("",), dense_error=2**-8),
    "dgc": Facts(
        variants=(
            "ratio=0.05",
            "ratio=0.05,momentum=0.5,nesterov=true,values=fp16",
            "ratio=0.05,clip_norm=1",
            "ratio=0.05,values=sign",
            "ratio=0.05,exchange=split",
            "ratio=0.1,exchange=split,accept=1.5,clip_norm=1,values=power",
            "ratio=1",
        ),
        conserves=(
            "ratio=0.05,momentum=0",
            "ratio=0.1,momentum=0,values=bf16",
            "ratio=0.001,momentum=0,values=fp16",
            "ratio=0.9,momentum=0,masking=false",
            "ratio=0.1,momentum=0,values=sign",
            "ratio=0.1,momentum=0,values=power",
            "ratio=0.1,momentum=0,exchange=split",
        ),
        rounds="elements",
        dense=("ratio=1,momentum=0",),
    ),
    "topk": Facts(
        variants=(
            "ratio=0.05",
            "ratio=0.1,values=fp16",
            "chunk=100,k=5,values=2bit,decay=0.9",
            "ratio=0.1,values=sign",
            "chunk=50,k=3,exchange=split,values=2bit",
        ),
        conserves=(
            "ratio=0.05",
            "ratio=0.1,values=fp16",
            "ratio=0.1,values=bf16",
            "ratio=0.9",
            "ratio=0.1,values=sign",
            "ratio=0.1,values=power",
            "chunk=100,k=5",
            "chunk=64,k=3,values=2bit",
            "ratio=0.1,exchange=split",
            "ratio=0.02,exchange=split,values=fp16",
            "k=20,exchange=split,values=power",
        ),
        rounds="elements",
        dense=("ratio=1",),
    ),
    "randomk": Facts(
        variants=("ratio=0.1",),
        conserves=("ratio=0.1", "ratio=0.7"),
        rounds="elements",
        dense=("ratio=1",),
        drawn="own",
    ),
    "strom": Facts(variants=("tau=0.5",), conserves=("tau=0.5", "tau=100"), scales=None),
    "adacomp": Facts(
        variants=("", "bin_length=7"),
        conserves=("", "bin_length=7", "bin_length=50,scale_factor=3"),
    ),
    "variance": Facts(
        variants=("", "alpha=0.5,tau=0.5", "error_feedback=true"),
        conserves=("error_feedback=true", "error_feedback=true,alpha=0.1", "tau=0.5"),
        scales=30,
    ),
    "globalrandk": Facts(
        variants=("ratio=0.1", "k=30,unbiased=true", "ratio=0.02,of=model"),
        conserves=("ratio=0.1", "k=3", "k=5,of=model"),
        rounds="elements",
        dense=("ratio=1", "k=100000", "ratio=1,unbiased=true", "ratio=1,of=model"),
        unbiased={
            "ratio=0.3,unbiased=true": any_variance,
            "ratio=0.3,of=model,unbiased=true": any_variance,
        },
        drawn="shared",
    ),
    "maxnorm": Facts(
        variants=("", "bits=2,norm=l2", "ratio=0.3", "k=30,unbiased=true", "k=3,of=model"),
        conserves=("ratio=0.3", "ratio=1,bits=2", "k=10,bits=8,norm=l2", "ratio=0.1,of=model"),
        unbiased={
            "": at_most(15),
            "bits=2": at_most(3),
            "bits=8": at_most(255),
            "ratio=0.3,unbiased=true": any_variance,
        },
        drawn="own",
    ),
    "multiscale": Facts(
        variants=("", "bits=2+4+8,norm=l2", "ratio=0.3", "k=30,unbiased=true", "k=3,of=model"),
        conserves=("ratio=0.3", "ratio=1", "k=10,bits=4+8,norm=l2"),
        unbiased={
            "": at_most(3),
            "bits=4+8": at_most(15),
            "bits=1+3+5": at_most(1),
            "ratio=0.3,unbiased=true": any_variance,
        },
        drawn="own",
    ),
    "terngrad": Facts(
        variants=("", "clip=0", "ratio=0.3", "k=30,unbiased=true"),
        conserves=("ratio=0.3", "ratio=1,clip=0"),
        unbiased={"clip=0": at_most(1), "clip=0,ratio=0.3,unbiased=true": any_variance},
        drawn="own",
    ),
    "signsgd": Facts(scales=None),
    "efsignsgd": Facts(conserves=("",)),
    "onebit": Facts(conserves=("",)),
    "natural": Facts(unbiased={"": lambda g: g**2 / 8}, drawn="own"),
    "powersgd": Facts(
        variants=("min_rate=0,rank=2", "min_rate=0,rank=2,start_step=2", ""),
        conserves=(
            "min_rate=0,rank=2",
            "min_rate=0,rank=1",
            "min_rate=0,rank=2,start_step=3",
            "",
        ),
        dense=("min_rate=0,rank=1000",),
        # Rounding of as many projections as there are columns.
        dense_error=5e-6,
        drawn="shared",
    ),
    "demo": Facts(
        variants=("k=5,chunk=8", "k=3,chunk=6,decay=0.9,values=2bit", "k=100,columns=1"),
        conserves=(
            "decay=1,k=5,chunk=8",
            "decay=1,k=9,chunk=30,values=fp16",
            "decay=1,k=4,chunk=5,values=sign",
        ),
        dense=("decay=1,k=4096", "decay=1,chunk=8,k=64"),
    ),
    "qsgd": Facts(
        variants=("bucket_size=64", "norm=max,bits=2", "coding=fixed", "coding=elias,levels=5"),
        unbiased={
            "bucket_size=64": any_variance,
            "norm=max,bucket_size=100000": at_most(15),
            "levels=1,bucket_size=32": any_variance,
        },
        drawn="own",
    ),
}


def spec_of(id, options):
    """The spec, with every tensor compressed."""
    if "min_numel" in hc.available()[id]["options"] and "min_numel" not in options:
        options = f"min_numel=0,{options}"
    return f"{id}:{options}"


def over(of):
    """Parametrizes a test over the specs that `of` takes from an id's facts."""
    specs = [
        (id, options) for id in hc.available() for options in (of(FACTS[id]) if id in FACTS else ())
    ]
    return pytest.mark.parametrize(
        "id, options", specs, ids=[f"{id}:{options}" for id, options in specs]
    )


def variants(facts):
    return facts.variants


SHAPES = {"w": (24, 30), "conv": (6, 5, 3, 3), "bias": (7,)}


def steps_of(seed, steps, size, shapes=SHAPES, spread=True):
    """gradients[step][rank][name] of flat arrays; with `spread` of very different sizes on the
    ranks."""
    rng = np.random.default_rng(seed)
    return [
        [
            {
                n: (rng.standard_normal(math.prod(s)) * (10.0**rank if spread else 1)).astype(
                    np.float32
                )
                for n, s in shapes.items()
            }
            for rank in range(size)
        ]
        for _ in range(steps)
    ]


def shaped(steps, shapes=SHAPES):
    return [
        [{n: g.reshape(shapes[n]) for n, g in named.items()} for named in ranks] for ranks in steps
    ]


def copies(ranks):
    return [{n: g.copy() for n, g in named.items()} for named in ranks]


def bytes_of(results):
    return [{n: g.tobytes() for n, g in named.items()} for named in results]


def with_seed(spec, seed):
    return (
        f"{spec},seed={seed}"
        if "seed" in hc.available()[spec.partition(":")[0]]["options"]
        else spec
    )


def residual_of(id, options, arrays):
    residual = hc.get_compressor(spec_of(id, options)).residual(State("", arrays))
    return np.zeros(1) if residual is None else residual.astype(np.float64)


def assert_conserved(id, options, sent, residuals, gradients):
    """sent: results[step], float arrays or None; residuals[rank]; gradients[step][rank]."""
    ranks = len(residuals)
    total = sum(g.astype(np.float64) for step in gradients for g in step)
    moved = sum(np.abs(g).astype(np.float64) for step in gradients for g in step)
    found = sum(ranks * mean.astype(np.float64) for mean in sent) + sum(residuals)
    if FACTS[id].rounds == "tensor" or "values=sign" in options or "values=2bit" in options:
        moved = np.linalg.norm(moved) if moved.size else 0
    assert (np.abs(found - total) <= 4e-7 * len(gradients) * moved + 1e-30).all()
