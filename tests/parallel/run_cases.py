"""One rank's part: runs the named cases of cases.py in order and appends a line of JSON to RESULTS.rank for each."""
import json
import sys
import time
import traceback

import horovod.torch as hvd
import torch
from cases import CASES


def main(results, names):
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    with open(f"{results}.{hvd.rank()}", "a") as out:
        for name in names:
            started, error = time.perf_counter(), None
            try:
                CASES[name][1]()
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps({"case": name, "error": error, "seconds": time.perf_counter() - started}), file=out, flush=True)
            if error:
                sys.exit(1)  # the ranks are no longer in step


main(sys.argv[1], sys.argv[2:])
