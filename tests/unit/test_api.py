"""Names, specs, simulate, and what importing costs."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest

import horovod_compress as hc
from horovod_compress.compressors import registry


def python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def test_importing_needs_no_framework():
    code = (
        "import sys, horovod_compress; print([m for m in ('torch', 'tensorflow', 'horovod', "
        "'mpi4py') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_reference_serves_where_nothing_was_built():
    code = (
        "import sys, warnings; sys.modules['horovod_compress.kernels.native._native'] = None\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always'); import horovod_compress as hc, "
        "horovod_compress.kernels as k\n"
        "import numpy as np\n"
        "run = hc.simulate('dgc:ratio=0.1', [[{'w': np.random.randn(40, 40)} for r in range(2)] "
        "for s in range(3)])\n"
        "print(k.backend, len(seen), 'compiler' in str(seen[0].message), run.bytes_sent[0][0] < "
        "1200)"
    )
    assert python(code, HOROVOD_COMPRESS_KERNELS="").stdout.strip() == "reference 1 True True"


@pytest.mark.parametrize(
    "wanted, error",
    [
        ("native", "ModuleNotFoundError"),
        (
            "fast",
            "ValueError: HOROVOD_COMPRESS_KERNELS must be native, reference or device, not 'fast'",
        ),
    ],
)
def test_kernels_that_are_asked_for_and_not_there_are_an_error(wanted, error):
    code = (
        "import sys; sys.modules['horovod_compress.kernels.native._native'] = None; import "
        "horovod_compress"
    )
    done = python(code, HOROVOD_COMPRESS_KERNELS=wanted)
    assert done.returncode != 0 and error in done.stderr


def test_the_reference_is_served_in_silence_where_it_is_asked_for():
    done = python(
        "import horovod_compress.kernels as k; print(k.backend)",
        HOROVOD_COMPRESS_KERNELS="reference",
    )
    assert (done.stdout.strip(), done.stderr) == ("reference", "")


def test_classes_are_exported_and_named_apart():
    assert {
        cls.id
        for cls in map(vars(hc).get, hc.__all__)
        if isinstance(cls, type) and hasattr(cls, "id")
    } == set(hc.available())
    assert hc.DGC(ratio=0.01) == hc.get_compressor("dgc:ratio=0.01")


def test_available_lists_options_and_papers():
    listed = hc.available()
    assert {"none", "dgc"} <= set(listed)
    assert listed["dgc"]["collective"] == "allgather" and "1712.01887" in listed["dgc"]["paper"]
    for name in (
        "ratio",
        "momentum",
        "nesterov",
        "masking",
        "clip_norm",
        "warmup_steps",
        "schedule",
        "sample_ratio",
        "values",
        "min_numel",
        "exclude",
        "seed",
        "transport",
    ):
        assert listed["dgc"]["options"][name]["doc"]
    json.dumps(listed)


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("dgc", {}),
        ("dgc:", {}),
        (" dgc : ratio = 0.01 , masking = FALSE ", {"ratio": 0.01, "masking": False}),
        ("dgc:exclude=a*+b.c,min_numel=0", {"exclude": ("a*", "b.c"), "min_numel": 0}),
        ("dgc:schedule=0/0.25+10/0.01", {"schedule": ((0, 0.25), (10, 0.01))}),
        ("dgc:momentum=none,nesterov=none,clip_norm=none", {}),
        ({"id": "dgc", "exclude": "a*+b.c"}, {"exclude": ("a*", "b.c")}),
        ({"id": "dgc", "ratio": 1}, {"ratio": 1.0}),
        ({"id": "dgc", "schedule": [[0, 0.5]]}, {"schedule": ((0, 0.5),)}),
    ],
)
def test_specs_and_round_trips(spec, expected):
    compressor = hc.get_compressor(spec)
    assert compressor == type(compressor)(**expected)
    assert hc.get_compressor(json.loads(json.dumps(compressor.config))) == compressor
    assert eval(repr(compressor), dict(vars(hc))) == compressor


@pytest.mark.parametrize(
    "spec, words",
    [
        ("dcg", ["unknown compressor 'dcg'", "none", "dgc"]),
        ("auto:candidates=none", ["auto is no algorithm", "{'id': 'auto', 'candidates'"]),
        ("dgc:rate=1", ["no option 'rate'", "ratio", "sample_ratio"]),
        ({"id": "dgc", "rate": 1}, ["no option 'rate'", "ratio"]),
        ("dgc:ratio", ["option=value", "'ratio'"]),
        ("dgc:ratio=0", ["ratio must be a number above 0 and at most 1"]),
        ("dgc:ratio=1.5", ["above 0 and at most 1", "1.5"]),
        ("dgc:ratio=nan", ["above 0"]),
        ("dgc:ratio=many", ["'many'"]),
        ({"id": "dgc", "ratio": "0.1"}, ["ratio must be a number"]),
        ({"id": "dgc", "ratio": True}, ["ratio must be a number"]),
        ("dgc:momentum=-1", ["momentum must be a number at least 0"]),
        ("dgc:masking=maybe", ["true or false"]),
        ("dgc:values=fp8", ["one of fp32, fp16, bf16, power, 2bit, sign"]),
        ("dgc:min_numel=-1", ["whole number"]),
        ("dgc:min_numel=1.5", ["whole number"]),
        ("dgc:schedule=1/0.5", ["from step 0 on"]),
        ("dgc:schedule=0/0.5+0/0.1", ["from step 0 on"]),
        ("dgc:schedule=0/2", ["from step 0 on"]),
        ("dgc:schedule=0/0.1,warmup_steps=5", ["not both"]),
        ("dgc:warmup_steps=3", ["warmup_steps must be 0, or a whole number, at least 4", "not 3"]),
        ("dgc:momentum=0,nesterov=true", ["nesterov needs"]),
        ("dgc:ratio=0.1,ratio=0.2", ["twice"]),
        ("dgc:transport=pigeon", ["one of horovod"]),
        ("none:ratio=1", ["none has no option 'ratio'"]),
        (5, ["a spec is"]),
        ({"ratio": 1}, ["a spec is"]),
        ({"id": 5}, ["a spec is"]),
    ],
)
def test_bad_specs_name_the_problem_and_what_is_valid(spec, words):
    with pytest.raises(ValueError) as error:
        hc.get_compressor(spec)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "spec", ["none", "dgc:ratio=0.1", "dgc:ratio=0.1,min_numel=0", "dgc:ratio=1,min_numel=0"]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 5), (3, 1, 7), (64, 33)])
def test_every_shape_and_dtype(spec, dtype, shape):
    rng = np.random.default_rng(0)
    grads = [[{"t": rng.standard_normal(shape).astype(dtype)} for _ in range(2)] for _ in range(3)]
    run = hc.simulate(spec, grads)
    assert all(mean["t"].shape == shape and mean["t"].dtype == np.float32 for mean in run.mean)
    assert all(np.isfinite(mean["t"]).all() for mean in run.mean)


def test_arrays_that_are_not_contiguous_are_copied_and_left_alone():
    base = np.arange(80.0 * 80).reshape(80, 80)
    kept = base.copy()
    view = base[::2, ::2].T
    run = hc.simulate("dgc:ratio=1,masking=false,momentum=0", [[{"w": view}]])
    np.testing.assert_array_equal(run.mean[0]["w"], view.astype(np.float32))
    np.testing.assert_array_equal(base, kept)


def test_simulate_refuses_ragged_input():
    a, b = {"w": np.zeros((40, 40))}, {"w": np.zeros((41, 40))}
    for grads, words in (
        ([], "at least one"),
        ([[]], "at least one"),
        ([[a], [a, a]], "step 1 has 2 ranks"),
        ([[a, b]], "rank 1"),
        ([[a], [{"x": np.zeros(3)}]], "step 1, rank 0"),
        ([[{7: np.zeros((40, 40))}]], "names must be str, not 7"),
    ):
        with pytest.raises(ValueError, match=words):
            hc.simulate("dgc", grads)


@pytest.mark.parametrize("moments", ["per_sample", "microbatch"])
def test_simulate_refuses_samples_that_it_does_not_have(moments):
    with pytest.raises(ValueError, match=f"moments={moments} needs a model's samples"):
        hc.simulate(f"variance:moments={moments}", [[{"w": np.ones((40, 40))}] * 2])


def test_no_array_is_printed():
    run = hc.simulate("topk", [[{"w": np.zeros((40, 40))}] * 2] * 3)
    assert repr(run) == "<3 steps of 2 ranks>"


@pytest.mark.parametrize("id", ["auto", "compress", "from_spec", "mro"])
def test_an_algorithm_of_another_package_hides_nothing(id, monkeypatch):
    """`Compression` has these names already."""
    cls = dataclasses.dataclass(frozen=True, repr=False)(type("Other", (hc.TopK,), {"id": id}))
    point = types.SimpleNamespace(value="other:Other", load=lambda: cls)
    monkeypatch.setattr(registry, "_installed", lambda: {id: [point]})
    with pytest.raises(ImportError, match=r"is installed as other:Other, which is no id that wor"):
        registry.find.__wrapped__(id)


def test_public_functions_are_documented():
    for function in (hc.simulate, hc.get_compressor, hc.available):
        assert inspect.getdoc(function)
