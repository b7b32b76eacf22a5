"""A compressor in a package of its own, installed beside this one, works by its id: on real ranks
in both frameworks, and without one. And a package that saves compressions."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from jobs import ENVIRONMENT, LAUNCHERS, LIMIT, launch

pytestmark = pytest.mark.extended
PACKAGE = pathlib.Path(__file__).parents[2] / "examples" / "compressor"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of processes that find the package installed."""
    source, installed = (
        tmp_path_factory.mktemp("source") / "compressor",
        tmp_path_factory.mktemp("installed"),
    )
    # Building leaves files beside the sources.
    shutil.copytree(PACKAGE, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        installed,
        source,
    ]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))
    }


def python(code, environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "cases, framework", [("cases", "torch"), ("tensorflow_cases", "tensorflow")]
)
def test_on_two_ranks(tmp_path, environment, cases, framework):
    hvd = pytest.importorskip(f"horovod.{framework}", reason=f"needs Horovod with {framework}")
    launcher = LAUNCHERS["mpirun" if hvd.mpi_built() else "horovodrun-gloo"]
    case = "a_compressor_of_another_package"
    launch(tmp_path, launcher, 2, [case], cases=cases, environment=environment).assert_passed(case)


def test_without_a_framework(environment):
    code = (
        "import numpy as np, horovod_compress as hc\n"
        "run = hc.simulate('cyclic:every=4,min_numel=0', [[{'w': np.ones(8)}] * 2] * 4)\n"
        "print([mean['w'].tolist() for mean in run.mean][:2], 'cyclic' in hc.available())\n"
        "from horovod_compress.session.choice import description_of\n"
        "print(description_of(hc.get_compressor('cyclic')))\n"
        "hc.get_compressor('cyclic:every=0')"
    )
    done = python(code, environment)
    assert done.stdout.startswith(
        "[[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]] True"
    ), done
    assert (
        sys.version_info < (3, 10) or "'package of cyclic': 'cyclic-compressor 0.1'" in done.stdout
    )
    assert "ValueError: cyclic: every must be a whole number, at least 1, not 0" in done.stderr


def test_one_that_is_broken_is_named(tmp_path, environment):
    """Nothing else suffers: it is left out of the list, with a warning, and an error where it is
    asked for."""
    (tmp_path / "cyclic_compressor.py").write_text("import what_is_not_there")
    broken = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])}
    listed = python(
        "import horovod_compress as hc; print('dgc' in hc.available(), 'cyclic' in hc.available())",
        broken,
    )
    assert (
        listed.stdout.strip() == "True False"
        and "cyclic_compressor:Cyclic, which cannot be imported" in listed.stderr
    )
    asked = python("import horovod_compress as hc; hc.get_compressor('cyclic')", broken)
    assert (
        "ImportError: the compressor 'cyclic' is installed as cyclic_compressor:Cyclic, which "
        "cannot be imported" in asked.stderr
    )


NO_OPTION = """
import dataclasses
from horovod_compress.compressors.selective import ErrorFeedback
class Unfinished(ErrorFeedback):
    id = "cyclic"
class Renamed(ErrorFeedback):
    id = "other"
@dataclasses.dataclass(frozen=True, repr=False)
class Plain(ErrorFeedback):
    id = "cyclic"
    every: int = 10
@dataclasses.dataclass(frozen=True, repr=False)
class Clashing(ErrorFeedback):
    id = "cyclic"
    discardable: bool = dataclasses.field(default=True, metadata={"kind": None, "doc": ""})
Cyclic = CLASS
"""


@pytest.mark.parametrize(
    "cls, said",
    [
        ("Unfinished", "which is not decorated as @dataclasses.dataclass"),
        ("Renamed", "whose id is 'other'"),
        ("dict", "which is no subclass of"),
        ("Plain", "whose field every is not made by"),
        ("Clashing", "whose option discardable has the name of an argument"),
    ],
)
def test_one_that_cannot_work_is_refused(tmp_path, environment, cls, said):
    (tmp_path / "cyclic_compressor.py").write_text(NO_OPTION.replace("CLASS", cls))
    wrong = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])}
    done = python(
        "import horovod_compress as hc; assert 'dgc' in hc.available(); "
        "hc.get_compressor('cyclic')",
        wrong,
    )
    assert (
        "ImportError: the compressor 'cyclic' is installed as cyclic_compressor:Cyclic, " + said
        in done.stderr
    )


def test_ids_that_clash_are_named(tmp_path, environment):
    """With an own algorithm of this package, which wins, and with each other's, of which none
    does."""
    clashing = tmp_path / "clashing-1.dist-info"
    clashing.mkdir()
    (clashing / "METADATA").write_text("Name: clashing\nVersion: 1\n")
    points = "[horovod_compress.compressors]\ntopk = clashing:TopK\ncyclic = clashing:Cyclic\n"
    (clashing / "entry_points.txt").write_text(points)
    both = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])}
    done = python(
        "import horovod_compress as hc; hc.get_compressor('topk'); hc.get_compressor('cyclic')",
        both,
    )
    assert "has a compressor 'topk' of its own: clashing:TopK is not used" in done.stderr
    assert (
        "ImportError: the compressor 'cyclic' is installed as " in done.stderr
        and "uninstall all but one" in done.stderr
    )


@pytest.mark.release
def test_what_accelerate_saves_goes_on_on_all_ranks(tmp_path):
    pytest.importorskip("accelerate")
    ranks = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2".split()
    job = [*ranks, pathlib.Path(__file__).with_name("accelerate_job.py"), tmp_path]
    done = subprocess.run(job, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
