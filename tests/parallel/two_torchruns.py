"""Runs a command on the ranks of two machines, which this one plays, with as many ranks on each:
two_torchruns.py RANKS COMMAND …"""

import contextlib
import socket
import subprocess
import sys


def main(ranks, *command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = f"-m torch.distributed.run --no-python --nnodes 2 --nproc_per_node {ranks} --master_addr"
    job = [sys.executable, *job.split(), "127.0.0.1", "--master_port", str(port), "--node_rank"]
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(subprocess.Popen([*job, number, *command])) for number in "01"
        ]
        return max(abs(machine.wait()) for machine in machines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
