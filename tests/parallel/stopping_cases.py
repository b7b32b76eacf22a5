"""Cases of which one stops its job, for test_jobs.py. They need no framework."""

import os
import pathlib
import sys
import threading
import time

from checks import registry

CASES, case = registry()
RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", 0))


def start():
    pass


def wait_for_what_never_comes():
    threading.Event().wait()


@case()
def passes():
    pass


def wait_until_both_have_passed():
    """Returns when both ranks have written that `passes` has ended, and may be stopped."""
    for rank in range(2):
        results = pathlib.Path(f"{sys.argv[2]}.{rank}")
        while not results.exists() or '"passes", "ended"' not in results.read_text():
            time.sleep(0.01)


@case()
def hangs_on_one_rank():
    wait_until_both_have_passed()
    if RANK == 1:
        wait_for_what_never_comes()


@case()
def fails_on_one_rank():
    wait_until_both_have_passed()
    assert RANK == 0, "rank 1 is wrong"


@case()
def crashes():
    wait_until_both_have_passed()
    os._exit(3)


@case()
def comes_after():
    wait_for_what_never_comes()
