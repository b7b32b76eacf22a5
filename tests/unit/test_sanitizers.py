"""The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer: hostile payloads, and
their tests again."""

import fcntl
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        shutil.which("g++") is None or sys.platform != "linux" or "NATIVE_UNDER_TEST" in os.environ,
        reason="builds with g++'s sanitizers",
    ),
]


@pytest.fixture(scope="module")
def environment():
    """What a Python needs to load the sanitized module, which is built where its sources have
    changed."""
    folder = ROOT / "build" / "sanitized"
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "HOROVOD_COMPRESS_SANITIZE": "1"}
    build = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        folder,
        "--build-temp",
        folder / "temp",
    ]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stale = [
            m for m in modules_in(folder) if m.stat().st_mtime < (ROOT / "setup.py").stat().st_mtime
        ]
        done = subprocess.run(
            build + ["--force"] * bool(stale),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=variables,
        )
    modules = modules_in(folder)
    assert modules and done.returncode == 0, done.stdout + done.stderr
    # libstdc++ too, or the sanitizer does not find the exceptions that it has to follow.
    libraries = [
        os.path.realpath(
            subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        )
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    variables.update(
        LD_PRELOAD=" ".join(libraries),
        ASAN_OPTIONS="detect_leaks=0",
        NATIVE_UNDER_TEST=str(modules[0]),
    )
    return variables


def modules_in(folder):
    return list(folder.glob("horovod_compress/kernels/native/_native*.so"))


def run(environment, *command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000] + done.stderr[-3000:]
    return done.stdout


def test_the_sanitizer_sees_what_it_should(environment):
    code = (
        "import native_under_test; from horovod_compress import kernels; from "
        "horovod_compress.kernels.native import _native\n"
        "assert kernels.native.seal_frame is _native.seal_frame; print(_native.__file__)"
    )
    beside = {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    }
    assert run(beside, "-c", code).strip() == environment["NATIVE_UNDER_TEST"]


@pytest.mark.parametrize("payloads", [11_000, pytest.param(100_000, marks=pytest.mark.release)])
def test_hostile_payloads(environment, payloads):
    found = run(environment, HERE / "fuzz_wire.py", str(payloads))
    assert found.startswith(f"native: {payloads} hostile payloads")


@pytest.mark.parametrize(
    "tier", [[], pytest.param(["--all"], marks=pytest.mark.release)], ids=["few examples", "all"]
)
@pytest.mark.parametrize(
    "tests",
    ["test_selection*.py", "test_kernels*.py"],
    ids=["test_selection.py", "test_kernels.py"],
)
def test_kernels(environment, tests, tier):
    # -s, or what a sanitizer says before it ends the process is lost with what pytest has captured.
    run(
        environment,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        *tier,
        *sorted(HERE.glob(tests)),
    )
