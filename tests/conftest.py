"""What all tests share: busy processes beside them, and how they are spread over processes."""
import contextlib
import pathlib
import subprocess
import sys

import pytest

PARALLEL = pathlib.Path(__file__).parent / "parallel"
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # ends with the tests, however they end
    sum(range(10**6))
"""


@contextlib.contextmanager
def busy_processes(number):
    """Inside, as many processes compute as hard as they can."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@pytest.fixture
def busy():
    return busy_processes


def pytest_addoption(parser):
    parser.addoption("--busy", type=int, default=0, metavar="N", help="run the tests beside N processes that keep the cores busy")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # once, not in every process of pytest-xdist
        stack = contextlib.ExitStack()
        stack.enter_context(busy_processes(config.getoption("busy")))
        config.add_cleanup(stack.close)


def pytest_collection_modifyitems(config, items):
    """With pytest-xdist, one process runs all jobs of real ranks: several tests ask for the same job."""
    for item in items:
        if PARALLEL in item.path.parents and config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
