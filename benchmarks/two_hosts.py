#!/usr/bin/env python3
"""Two hosts, a and b, on one machine: network namespaces joined by a link of a chosen speed. Needs
root and iproute2.

    benchmarks/two_hosts.py --rate 1gbit --
        horovodrun -np 2 -H a:1,b:1 --network-interfaces eth0 python train.py
    benchmarks/two_hosts.py -- mpirun -np 4 -H a:2,b:2 python train.py

The command runs on host a, where a and b are names, `ssh` starts commands on both, and Open MPI is
told to use the link. Ranks of one host find each other through shared memory, those of different
hosts through the link only. Nothing outside is changed, and everything is taken down at the end.
The ssh is a stand-in that enters the other host's namespace, so no ssh server is needed.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HOSTS = {"a": "10.213.77.1", "b": "10.213.77.2"}  # {name: address}
LAUNCHERS = {
    "gloo": "horovodrun --gloo -np {ranks} -H {hosts} --network-interfaces eth0",
    "mpi": "mpirun -np {ranks} -H {hosts}",
}
_numbers = itertools.count()
# What launchers need of ssh: options before and after the host are skipped, the rest is a command
# line for the host's shell.
_SSH = """#!/bin/sh
host=
while [ $# -gt 0 ]; do
    case $1 in
        -[oip]) shift 2 ;;
        -*) shift ;;
        *) if [ "$host" ]; then break; fi; host=$1; shift ;;
    esac
done
case $host in {cases} *) echo "ssh: there is no host $host" >&2; exit 255 ;; esac
exec {enter} sh -c "$*"
"""
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "tcp,vader,self",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_oob_tcp_if_include": "eth0",
    # Seconds until it looks whether a silent host is still there, else 300.
    "OMPI_MCA_oob_tcp_keepalive_time": "5",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "1",
    "OMPI_MCA_oob_tcp_keepalive_probes": "3",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # both hosts are on the same cores
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Else the first rank of each host is bound to the same core.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def link_rate(text):
    """A link's rate, as tc writes it, or none: for argparse."""
    if not re.fullmatch(r"none|\d+(\.\d+)?[kmg]?bit", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate such as 100mbit, 1gbit or none; specs come before --rates"
        )
    return text


class Hosts:
    """A context: the hosts exist inside it.

    rate: of their link in each direction, as tc writes it ("100mbit"), or "none": as fast as it
    goes.

    Raises RuntimeError where this cannot work, saying what is missing.
    """

    def __init__(self, rate="none"):
        if os.geteuid() != 0:
            raise RuntimeError("hosts on one machine need root, to make network namespaces")
        tools = {
            tool: shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
            for tool in ("ip", "tc", "unshare")
        }
        if None in tools.values():
            raise RuntimeError(
                f"missing: {', '.join(tool for tool in tools if not tools[tool])}; apt-get install "
                f"iproute2"
            )
        self._tools = tools
        self._rate = rate
        number = f"hvdc-{os.getpid()}-{next(_numbers)}"
        self._spaces = {host: f"{number}-{host}" for host in HOSTS}

    def __enter__(self):
        try:
            return self._made()
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"two hosts cannot be made here: {error}") from error

    def _made(self):
        with contextlib.ExitStack() as stack:
            self._folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._make_ssh()
            for space in self._spaces.values():
                self._make_space(stack, space)
            self._make_link()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def command(self, host, argv):
        """The command that runs argv on a host."""
        return [*self._enter(self._spaces[host], host), *map(str, argv)]

    @property
    def environment(self):
        """The environment of commands, in which ssh and Open MPI work between the hosts."""
        # Horovodrun is beside Python.
        path = os.pathsep.join(
            [str(self._folder), os.path.dirname(sys.executable), os.environ["PATH"]]
        )
        return {**os.environ, **_OPEN_MPI, "PATH": path}

    def run(self, host, argv, **options):
        """subprocess.run of argv on a host."""
        return subprocess.run(self.command(host, argv), env=self.environment, **options)

    def measure(self, launcher, ranks, script, arguments):
        """Runs `script` in a job of its own, as many ranks on each host, and returns what it
        measures: it writes JSON to the file that --worker names.

        Exits, with all that the job said, where it fails.
        """
        each = ranks // len(HOSTS)
        command = LAUNCHERS[launcher].format(
            ranks=ranks, hosts=",".join(f"{host}:{each}" for host in HOSTS)
        )
        with tempfile.NamedTemporaryFile("r") as found:
            job = [*command.split(), sys.executable, script, "--worker", found.name, *arguments]
            done = self.run("a", job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode:
                sys.exit(
                    f"{done.stdout.decode(errors='replace')}\nfailed: {shlex.join(map(str, job))}"
                )
            return json.load(found)

    def cut(self, host):
        """Takes a host off the link."""
        self._ip("-n", self._spaces[host], "link", "set", "eth0", "down")

    def _enter(self, space, host):
        """The command line that runs another one in a namespace, under a host's name."""
        rename = 'hostname "$0"; exec "$@"'
        return [
            self._tools["ip"],
            "netns",
            "exec",
            space,
            self._tools["unshare"],
            "--uts",
            "sh",
            "-c",
            rename,
            host,
        ]

    def _ip(self, *arguments):
        subprocess.run([self._tools["ip"], *arguments], check=True)

    def _make_ssh(self):
        cases = " ".join(
            f"{host}|{HOSTS[host]}) host={host} space={space} ;;"
            for host, space in self._spaces.items()
        )
        enter = (
            shlex.join(self._enter("SPACE", "HOST"))
            .replace("SPACE", '"$space"')
            .replace("HOST", '"$host"')
        )
        # Found before the system's: horovodrun and mpirun both call it by name.
        ssh = self._folder / "ssh"
        ssh.write_text(_SSH.format(cases=cases, enter=enter))
        ssh.chmod(0o755)

    def _make_space(self, stack, space):
        self._ip("netns", "add", space)
        stack.callback(self._ip, "netns", "delete", space)
        # `ip netns exec` shows its files as /etc's.
        names = pathlib.Path("/etc/netns", space)
        names.mkdir(parents=True)
        stack.callback(shutil.rmtree, names)
        (names / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {host}\n" for host, address in HOSTS.items())
        )

    def _make_link(self):
        one, other = self._spaces.values()
        self._ip(
            *("link", "add", "eth0", "netns", one, "type", "veth"),
            *("peer", "name", "eth0", "netns", other),
        )
        for host, space in self._spaces.items():
            self._ip("-n", space, "address", "add", f"{HOSTS[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", space, "link", "set", device, "up")
            if self._rate != "none":
                shape = ["tbf", "rate", self._rate, "burst", "128kb", "latency", "50ms"]
                subprocess.run(
                    [self._tools["tc"], "-n", space, "qdisc", "add", "dev", "eth0", "root", *shape],
                    check=True,
                )
        for space in self._spaces.values():
            self._wait_for_link(space)

    def _wait_for_link(self, space):
        show = [self._tools["ip"], "-n", space, "-brief", "link", "show", "eth0", "up"]
        # On a busy machine; else it takes less than a second.
        until = time.monotonic() + 120
        while " UP " not in subprocess.run(show, check=True, capture_output=True, text=True).stdout:
            if time.monotonic() > until:
                raise RuntimeError("two hosts cannot be made here: their link stays down")
            time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate",
        type=link_rate,
        default="none",
        help="of the link in each direction: 100mbit, 1gbit (default: as fast as it goes)",
    )
    parser.add_argument("command", nargs="+", help="what to run on host a, after --")
    options = parser.parse_args()
    # Through the contexts, so that all is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Hosts(options.rate) as hosts:
            sys.exit(hosts.run("a", options.command).returncode)
    except RuntimeError as error:
        parser.exit(1, f"two_hosts.py: {error}\n")


if __name__ == "__main__":
    main()
