"""What `Compression.<id>` is in both frameworks: a factory that shows its options, and passes them
on as a spec."""

import inspect
import pickle
import warnings

import pytest

from horovod_compress import get_compressor
from horovod_compress.session import notices
from horovod_compress.session.bound import Bound
from horovod_compress.session.choice import momentum_of, requested_compressor
from horovod_compress.session.factories import Algorithms
from horovod_compress.session.unbound import NotBoundError, Unbound


class Compression(metaclass=Algorithms):
    """As a framework's: records what it is asked for."""

    @staticmethod
    def from_spec(spec, optimizer=None, *, process_set=None, discardable=False):
        return spec, optimizer, process_set

    @staticmethod
    def compress(tensor):
        raise TypeError("call it")


def test_options_become_a_spec_and_arguments_stay_arguments():
    assert Compression.dgc("sgd", ratio=0.01, process_set="all") == (
        {"id": "dgc", "ratio": 0.01},
        "sgd",
        "all",
    )
    assert Compression.none() == ({"id": "none"}, None, None)


def test_only_spec_and_optimizer_go_by_position():
    with pytest.raises(TypeError, match="by its name"):
        Compression.dgc("sgd", "all")


def test_an_editor_sees_arguments_and_options():
    signature = inspect.signature(Compression.topk)
    assert list(signature.parameters)[:2] == ["optimizer", "process_set"]
    assert (
        signature.parameters["ratio"].default == 0.001
        and signature.parameters["ratio"].kind is inspect.Parameter.KEYWORD_ONLY
    )
    assert (
        "residual" in Compression.topk.__doc__
        and "ratio: share of a tensor's elements" in Compression.topk.__doc__
    )
    assert Compression.topk.__name__ == "topk" and {"dgc", "topk", "from_spec"} <= set(
        dir(Compression)
    )


def test_a_factory_is_one_object_and_pickles():
    assert Compression.dgc is Compression.dgc
    assert pickle.loads(pickle.dumps(Compression.dgc)) is Compression.dgc


@pytest.mark.parametrize("name", ["unknown", "_private", "compress_all"])
def test_what_is_no_algorithm_is_no_attribute(name):
    assert not hasattr(Compression, name)
    with pytest.raises(AttributeError, match=name):
        getattr(Compression, name)


def test_the_id_is_no_option():
    with pytest.raises(TypeError, match="id"):
        Compression.dgc(id="topk")


def test_an_uncalled_factory_given_to_horovod_says_so():
    for given in (Compression, Compression.dgc):
        with pytest.raises(TypeError, match="call it"):
            given.compress(None)


class Waiting(Unbound):
    """For an optimizer that is looked for, and is not there."""

    _bound_class = Bound
    _bound = ()
    searches = 0

    def the_only(self):
        self.searches += 1
        raise NotBoundError("no optimizer has this compression yet")


def test_what_a_bound_compression_has_can_be_asked_for_before():
    waiting = Waiting("topk")
    assert hasattr(waiting, "stats") and not hasattr(waiting, "stat")
    assert waiting.searches == 0
    for ask in (waiting.stats, lambda: waiting.config):
        with pytest.raises(RuntimeError, match="no optimizer has this compression yet"):
            ask()
    assert not hasattr(waiting, "config") and waiting.searches == 3


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("dgc", (0.9, True)),
        ("dgc:momentum=0.5", (0.5, True)),
        ("dgc:nesterov=false", (0.9, False)),
        ("dgc:momentum=0", (0.0, False)),
    ],
)
def test_what_options_say_counts_more_than_the_optimizer(spec, expected):
    assert momentum_of(get_compressor(spec), {"momentum": 0.9, "nesterov": True}) == expected
    assert momentum_of(
        get_compressor("dgc:nesterov=true"), {"momentum": 0.5, "nesterov": False}
    ) == (0.5, True)


@pytest.mark.parametrize(
    ("spec", "optimizer", "advised"),
    [
        ("topk", "AdamW", ["UpdateOptimizer"]),
        ("dgc:momentum=0", "RMSprop", ["UpdateOptimizer"]),
        ("adacomp", "Adam", ["UpdateOptimizer"]),
        ("topk", "SGD", []),
        ("powersgd", "Adam", []),
        ("variance", "SGD", ["moments=per_sample"]),
        ("variance:moments=microbatch", "Adam", []),
    ],
)
def test_what_has_cost_accuracy_is_warned_of_once(monkeypatch, spec, optimizer, advised):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(notices, "_warned", set())
    # Horovod's optimizers are of classes derived from the user's.
    kind = type("Wrapped", (getattr(torch.optim, optimizer),), {})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            requested_compressor(spec, kind([torch.zeros(1)], lr=0.1), False)
    assert len(found) == len(advised)
    assert all(advice in str(each.message) for advice, each in zip(advised, found))
