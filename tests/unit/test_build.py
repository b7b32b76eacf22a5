"""What an install does where the native kernels cannot be built, and where they are not wanted."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="breaks the compiler by Linux's means"
)


@pytest.fixture
def build(tmp_path):
    """Builds, with a compiler that fails, for given values of HOROVOD_COMPRESS_KERNELS."""
    for module, least in ("pybind11", "2.11"), ("setuptools", "77"):
        pytest.importorskip(module, least, reason="building needs it")
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: this compiler knows nothing' >&2\nexit 1\n")
    compiler.chmod(0o755)

    def run(**variables):
        command = [
            sys.executable,
            "setup.py",
            "egg_info",
            "--egg-base",
            tmp_path,
            "build",
            "--build-base",
            tmp_path / "build",
        ]
        environment = {**os.environ, "CC": str(compiler), "CXX": str(compiler), **variables}
        environment.pop("HOROVOD_COMPRESS_SANITIZE", None)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


def test_a_failed_compile_fails_the_install(build):
    done = build(HOROVOD_COMPRESS_KERNELS="")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    for words in (
        "this compiler knows nothing",
        "HOROVOD_COMPRESS_KERNELS=reference",
        "could not be built",
    ):
        assert words in said


def test_the_reference_alone_needs_no_compiler(build, tmp_path):
    done = build(HOROVOD_COMPRESS_KERNELS="reference")
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("build/lib*/horovod_compress")
    assert (package / "kernels" / "reference" / "lowrank.py").exists()
    assert "def dgc(" in (package / "torch" / "factories.pyi").read_text()
    assert not list(package.rglob("*.so"))
