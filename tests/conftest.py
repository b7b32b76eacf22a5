"""What all tests share: the tiers, busy processes beside them, and the order.

`scripts/test` runs what is not marked, `--all` what is marked `extended` too, and `--slow` only
what is marked `release`.
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import hypothesis
import pytest


def gpu_is_there():
    """Whether torch sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


# Triton reads this when it is first imported, by a test of either folder. Without a GPU the kernels
# on devices are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if gpu_is_there() else "1")
# A process that imports Triton after TensorFlow 2.21 is ended by LLVM, of which both have one.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401
# Processes share cores with others: threads that wait for each other take many times as long then.
for library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# Horovod's optimizers need Keras 2, which is not tf.keras by itself since TensorFlow 2.16.
if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")


@contextlib.contextmanager
def busy_processes(number):
    """Inside, as many processes compute as hard as they can."""
    # Ends with the tests, however they end.
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10**6))"
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", loop])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@pytest.fixture
def busy():
    return busy_processes


MARKERS = {
    "extended": "runs with --all only: a promise that a shorter test shows too, in more settings",
    "release": "runs with --slow only: what a release needs beside --all",
}


def pytest_addoption(parser):
    parser.addoption(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="run the tests beside N processes that keep the cores busy",
    )
    parser.addoption("--all", action="store_true", help="run the tests marked `extended` too")
    parser.addoption(
        "--slow", action="store_true", help="run the tests marked `release`, only those"
    )


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    _choose_examples(config.getoption("--all") or config.getoption("--slow"))
    # Once, not in every process of pytest-xdist.
    if not hasattr(config, "workerinput"):
        stack = contextlib.ExitStack()
        stack.enter_context(busy_processes(config.getoption("busy")))
        config.add_cleanup(stack.close)


def _choose_examples(every):
    """At most 15 examples of each property, or as many as it asks for. No test asserts on time."""
    patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("few", max_examples=15, **patient)
    hypothesis.settings.register_profile("every", max_examples=10**6, **patient)
    hypothesis.settings.load_profile("every" if every else "few")


def _runs(item):
    """Whether a test is of the tier that was asked for."""
    release, extended = (item.get_closest_marker(name) for name in ("release", "extended"))
    if item.config.getoption("--slow"):
        return bool(release)
    return not release and (not extended or item.config.getoption("--all"))


def pytest_collection_modifyitems(config, items):
    """Leaves out other tiers, and has the groups of `_group` one after the other."""
    left_out = [item for item in items if not _runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(filter(_runs, items), key=lambda item: _group(item.nodeid))


# Files whose tests share a fixture that trains or compiles.
SHARE_A_FIXTURE = ("tests/unit/test_convergence.py", "tests/unit/test_sanitizers.py")
# Files whose jobs of ranks compute all the time. Those of the others mostly wait.
BUSY = ("ddp", "devices", "ranks", "tensorflow", "users")


def _group(nodeid):
    """Jobs of ranks come first: those that mostly wait while other tests have much to do, those
    that compute after them."""
    if not nodeid.startswith("tests/parallel/"):
        return 2
    return int(nodeid.split("::")[0].endswith(tuple(f"/test_{file}.py" for file in BUSY)))


def pytest_runtest_setup(item):
    # After such a test pytest-xdist gives no job to its process.
    if hasattr(item.config, "workerinput") and _group(item.nodeid) == 2:
        _leave_cores_to_jobs()


@functools.lru_cache(maxsize=None)
def _leave_cores_to_jobs():
    """From now on this process has a third of the time that a job of ranks has where both compute:
    ranks that are kept from computing make the others wait."""
    os.nice(5)
    # Where Linux deals time to sessions first, niceness counts within one.
    os.setsid()
    shares = pathlib.Path("/proc/self/autogroup")
    if shares.exists():
        shares.write_text("5")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All jobs of ranks are run by one of pytest-xdist's processes, because two jobs at once wait
    for each other, and several tests ask for the same job. So is a file whose tests share what
    takes long to make. pytest-xdist's own marker for groups does not work with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            if file in SHARE_A_FIXTURE:
                return file
            return nodeid if _group(nodeid) == 2 else "jobs"

    return Scheduling(config, log)
