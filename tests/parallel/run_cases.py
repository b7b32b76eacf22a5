"""One rank's part: runs the named cases of a file in order, and writes to RESULTS.rank a line of
JSON when one begins and when it ends.

At SIGUSR1 it writes the stacks of its threads to RESULTS.rank.stacks, wherever it is, and goes on.
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback

# Imports and hvd.init(), reported like a case.
START = "the start of the ranks"
# What launchers say: Horovod's, Open MPI's, and PyTorch's.
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")


def own_rank():
    """Of this process. Known before hvd.init(), which may hang."""
    return next(os.environ[name] for name in _RANK if name in os.environ)


def main(file, results, names):
    rank = own_rank()
    with open(f"{results}.{rank}.stacks", "w") as stacks, open(f"{results}.{rank}", "a") as out:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        cases = recorded(out, START, lambda: started(file))
        for name in names:
            recorded(out, name, cases[name][1])


def started(file):
    cases = importlib.import_module(file)
    cases.start()
    # What imports have made stays: the collector need not look through it again and again. Cases in
    # PyTorch look for objects, which takes many times as long among those that are hidden so.
    if "torch" not in sys.modules:
        gc.freeze()
    return cases.CASES


def recorded(out, case, function):
    """What the function returns; where it fails, the rank ends, because the ranks are no longer in
    step."""
    result = error = None
    print(
        json.dumps({"case": case, "pid": os.getpid(), "began": time.time()}), file=out, flush=True
    )
    try:
        result = function()
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps({"case": case, "ended": time.time(), "error": error}), file=out, flush=True)
    if error:
        sys.exit(1)
    return result


if __name__ == "__main__":
    # What a job sets on one rank only, before anything is imported.
    rank, _, kernels = os.environ.get("KERNELS_ON_RANK", "").partition(":")
    if rank == own_rank():
        os.environ["HOROVOD_COMPRESS_KERNELS"] = kernels
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
