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
    """On both ranks before one of them stops the job."""
    here = [pathlib.Path(f"{sys.argv[2]}.{rank}.passes") for rank in range(2)]
    here[RANK].touch()
    while not all(file.exists() for file in here):
        time.sleep(0.01)
    # The other is to write that it has passed.
    time.sleep(1)


@case()
def hangs_on_one_rank():
    if RANK == 1:
        wait_for_what_never_comes()


@case()
def fails_on_one_rank():
    assert RANK == 0, "rank 1 is wrong"


@case()
def crashes():
    os._exit(3)


@case()
def comes_after():
    wait_for_what_never_comes()
