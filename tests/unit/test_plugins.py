"""Algorithms of other packages, which override methods of one tensor."""

import dataclasses

import numpy as np
import pytest
from ranks import gradients, ranks_of

from horovod_compress.compressors.base import Traits
from horovod_compress.compressors.bf16 import BFloat16
from horovod_compress.compressors.fp16 import Float16
from horovod_compress.compressors.maxnorm import MaxNorm
from horovod_compress.compressors.none import NoCompression
from horovod_compress.compressors.options import Count, option
from horovod_compress.compressors.topk import TopK
from horovod_compress.compressors.wrapper import Wrapper, with_options
from horovod_compress.engine.lockstep import make_ranks, run_step
from horovod_compress.protocol.requests import ToReducer
from horovod_compress.transport.loopback import Loopback

SHAPES = {"w": (30, 40)}


def last_result(compressor):
    exchanges = make_ranks(compressor, SHAPES, Loopback.group(2))
    for seed in range(2):
        results = run_step(exchanges, gradients(seed, shapes=SHAPES))
    return results[0]["w"]


def looking_at_results(base):
    """A subclass that looks at what each method returns, or calls it for its effect alone."""

    def encode(self, grad, state, step):
        payload = base.encode(self, grad, state, step)
        assert getattr(payload, "finite", True)
        return payload

    def add(self, body, out, scale):
        base.add(self, body, out, scale)
        return bool(np.isfinite(out).all())

    def decode(self, summed, out, state, step, scale):
        return base.decode(self, summed, out, state, step, scale) and True

    def decode_dense(self, reduced, out, state, scale):
        return bool(base.decode_dense(self, reduced, out, state, scale) and np.isfinite(out).all())

    methods = {each.__name__: each for each in (encode, add, decode, decode_dense)}
    return dataclasses.dataclass(frozen=True, repr=False)(
        type("Looking", (base,), {"__module__": __name__, **methods})
    )


@pytest.mark.parametrize(
    "plain",
    [TopK(ratio=0.1, min_numel=0), BFloat16(), Float16(), MaxNorm(min_numel=0), NoCompression()],
)
def test_what_super_returns_is_there_on_the_cpu(plain):
    looking = looking_at_results(type(plain))(**dataclasses.asdict(plain))
    np.testing.assert_array_equal(last_result(looking), last_result(plain))


@dataclasses.dataclass(frozen=True, repr=False)
class OfM(NoCompression):
    """Has an option m that is no momentum."""

    m: int = option(Count(), 4, "anything")


def test_an_option_m_is_no_momentum_where_nothing_has_one():
    exchanges, grads = ranks_of("topk:ratio=0.1,min_numel=0", shapes=SHAPES), gradients(0)
    expected = sum(named["w"].astype(np.float64) for named in grads) / 2
    sent = run_step(exchanges, [{"w": named["w"]} for named in grads])[0]["w"].copy()
    for exchange in exchanges:
        exchange.switch(OfM(), {"w": (SHAPES["w"], OfM())}, {})
    sent += run_step(exchanges, [{"w": np.zeros(1200, np.float32)} for _ in grads])[0]["w"]
    np.testing.assert_allclose(sent, expected, atol=1e-6)


@dataclasses.dataclass(frozen=True, repr=False)
class TopKOfM(TopK):
    """Has one that a spec may leave open, and says so by position."""

    m: int = option(Count(1, 9, True), None, "anything")


def test_nor_is_it_momentum_of_topk():
    for m in (None, 9):
        mine = last_result(TopKOfM(ratio=0.1, min_numel=0, m=m))
        np.testing.assert_array_equal(mine, last_result(TopK(ratio=0.1, min_numel=0)))


def test_names_of_what_others_have_to_know_are_taken():
    with pytest.raises(TypeError, match="named traits or policy"):
        type("Named", (NoCompression,), {"policy": "mine"})


def test_a_derived_algorithm_has_a_number_of_its_own():
    own = {"id": "own", "traits": TopK.traits._replace(on_device=False)}
    assert type("Own", (TopK,), own).traits.number >= 128


@dataclasses.dataclass(frozen=True, repr=False)
class Clipped(TopK):
    """Sets an option that others read when it is made."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "clip_norm", 1.0)


def test_others_read_what_an_algorithm_has_set_itself():
    assert Clipped().policy.clip_norm == 1.0


@dataclasses.dataclass(frozen=True, repr=False)
class Halved(TopK):
    """Decodes half of what was sent, and nothing but zeros in a step without a gradient."""

    def encode(self, grad, state, step):
        encoded = super().encode(grad, state, step)
        return encoded if step.index == 0 else ToReducer(np.zeros_like(grad))

    def add(self, body, out, scale):
        return super().add(body, out, scale / 2)


def test_split_leaves_an_algorithm_its_own_methods():
    spec = {"ratio": 0.1, "min_numel": 0, "exchange": "split"}
    exchanges = [
        make_ranks(each, SHAPES, Loopback.group(2)) for each in (TopK(**spec), Halved(**spec))
    ]
    plain, halved = (run_step(ranks, gradients(0, shapes=SHAPES))[0]["w"] for ranks in exchanges)
    np.testing.assert_allclose(halved, plain / 2)
    assert plain.any() and not run_step(exchanges[1], gradients(1, shapes=SHAPES))[0]["w"].any()


def test_a_class_says_for_itself_what_kernels_and_types_suit_it():
    inherited = type("Derived", (TopK,), {}).traits
    assert inherited == TopK.traits._replace(on_device=False)
    assert not type("Derived", (NoCompression,), {}).traits.carries_float64


def test_a_payloads_size_is_known_whatever_else_a_class_says():
    derived = type("Derived", (BFloat16,), {"traits": Traits(paper="mine")})
    assert derived().payload_bits(100, None) == 16 and derived().stage(3) is None


@pytest.mark.parametrize(
    "inside", [TopK(ratio=0.1, min_numel=0), Float16(), MaxNorm(min_numel=0), NoCompression()]
)
def test_a_wrapper_that_overrides_nothing_is_what_is_inside(inside):
    np.testing.assert_array_equal(last_result(Wrapper(inside)), last_result(inside))
    assert repr(Wrapper(inside)) == repr(inside) and Wrapper(inside).policy == inside.policy


def test_options_change_inside_of_wrappers():
    assert with_options(Wrapper(TopK()), ratio=0.5) == Wrapper(TopK(ratio=0.5))
