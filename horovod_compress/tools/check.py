"""hvdcompress check: checks a cluster and predicts a step on its network."""

import argparse
import os
import sys
from typing import Any

from . import plan, prediction
from .printing import console, write_json

_EPILOG = """\
horovodrun -np 4 -H host1:2,host2:2 hvdcompress check --model resnet50 --json network.json
mpirun -np 4 -H host1:2,host2:2 hvdcompress check --parameters 25.6M
torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint host1:29400 \\
    --no-python hvdcompress check --model resnet50

torchrun's command is the same on both machines.

It compares the installations of all ranks. It runs every algorithm on every transport and compares
the results with a simulation. It measures the collectives and predicts a step with each SPEC. The
exit status is 1 if ranks differ or an algorithm fails. Without a launcher it checks this machine.
`hvdcompress plan --network network.json` predicts more on the measured network.
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="check a cluster, and predict what pays there; run it on all ranks",
        description="Checks a cluster, and predicts which compression pays there. Run it on all "
        "ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_prediction(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> None:
    try:
        compressors = prediction.compressors_of(options.specs)
    except ValueError as error:
        options.parser.error(str(error))
    try:
        from . import cluster, job

        # torchrun's, where that has started this process, else Horovod's.
        started = job.of_torchrun if "TORCHELASTIC_RUN_ID" in os.environ else job.of_horovod
        ranks = started()
    except ImportError as error:
        sys.exit(
            f"hvdcompress check needs Horovod with PyTorch: {error} (pip install "
            "'horovod-compress[horovod]'). Or start it by torchrun"
        )
    first = not ranks.transport.rank
    if first:
        ranks.say = console(stderr=options.json == "-").print
    found = cluster.run(
        ranks, compressors, plan.model_of(options), 1e-3 * options.backward, options.device
    )
    if first and not write_json(found, options.json) and "predictions" in found:
        plan.show_predictions([found])
    # One rank has no predictions: there is no network.
    well = "all is well" if "predictions" in found else "all is well, as far as one rank shows"
    ranks.say(f"\n{well}" if found["good"] else "\nsomething is wrong: see above")
    sys.exit(not found["good"])
