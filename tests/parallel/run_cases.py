"""One rank's part: runs the named cases of a file in order and appends a line of JSON to RESULTS.rank for each."""
import importlib
import json
import sys
import time
import traceback


def main(file, results, names):
    cases = importlib.import_module(file)
    rank = cases.start()
    with open(f"{results}.{rank}", "a") as out:
        for name in names:
            started, error = time.perf_counter(), None
            try:
                cases.CASES[name][1]()
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps({"case": name, "error": error, "seconds": time.perf_counter() - started}), file=out, flush=True)
            if error:
                sys.exit(1)  # the ranks are no longer in step


main(sys.argv[1], sys.argv[2], sys.argv[3:])
