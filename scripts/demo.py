"""Trains examples/pytorch_images.py with several compressions, shows how it goes, then a table and
a picture.

scripts/demo calls this once everything is installed. As root the ranks are on two hosts that this
machine plays, with a slow link between them (benchmarks/two_hosts.py), and times are measured.
Elsewhere they are on one host, and the link's share of the times is computed.
"""

import argparse
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOROVODS_OWN = ("none", "fp16")
SPECS = ("none", "dgc:ratio=0.01,warmup_steps=120")
# Points of accuracy: times are compared where this much is missing to what `none` ends with.
BEHIND = 0.5


def main():
    options = parse()
    if options.check:
        return

    from rich.console import Console

    # As an interrupt: the job ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    if not console.is_terminal:
        # Else 80, whatever becomes of the output.
        console.width = 120
    hosts = two_hosts(options, console)
    with tempfile.TemporaryDirectory() as folder:
        events, log = pathlib.Path(folder, "events"), pathlib.Path(folder, "log")
        events.touch()
        with open(log, "wb") as output:
            # A session of its own: an interrupt reaches this process alone, which ends the job in
            # good order.
            job = subprocess.Popen(
                [*hosts, *command(options, events, bool(hosts))],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            runs = follow(job, events, console)
        finally:
            job.terminate()
            job.wait()
        if len(runs) < len(options.specs):
            console.print(
                f"[red]training stopped with exit status {job.returncode}[/red]; what it printed "
                f"about that:"
            )
            printed = log.read_text(errors="replace")
            # A rank's; the launcher's own comes after it and says less.
            first = printed.find("Traceback")
            console.print(
                printed[first:][:6000] if first >= 0 else printed[-6000:],
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            sys.exit(1)
    if not hosts:
        runs = [over_link(run, options.link) for run in runs]
    console.print(table(runs, options, bool(hosts)))
    for line in conclusions(runs):
        console.print(line, highlight=False)
    draw(runs, options, bool(hosts))
    console.print(f"picture: {options.output}")


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Trains a small network with and without compression, and compares accuracy, "
        "bytes and time.\n\n"
        "As root, and with iproute2, the ranks are on two hosts that this machine plays, joined by "
        "a link of 100 Mbit/s, and times\n"
        "are measured. Otherwise they are on one host: accuracy and bytes are measured, and the "
        "link's share of the times is computed.",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="half of them on each host (default: 2)"
    )
    parser.add_argument(
        "--hosts", type=int, choices=(1, 2), help="default: 2 where they can be made"
    )
    parser.add_argument(
        "--link",
        type=int,
        default=100,
        metavar="MBIT",
        help="Mbit/s between the hosts (default: 100)",
    )
    parser.add_argument(
        "--epochs", type=int, help="default: 3, or 60 with the few images of the digits"
    )
    parser.add_argument(
        "--specs",
        nargs="+",
        metavar="SPEC",
        default=SPECS,
        help=f"none and fp16 are Horovod's own, others are specs of this package (default: "
        f"{' '.join(SPECS)})",
    )
    parser.add_argument(
        "--data",
        help="folder of IDX files; default: Fashion-MNIST if installed, else scikit-learn's digits",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=50000,
        help="train on the first so many images (default: 50000)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lr", type=float, default=0.16, help="the highest learning rate (default: 0.16)"
    )
    parser.add_argument("--output", default="demo.png", help="the picture (default: demo.png)")
    # Before anything is installed.
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, least in (("ranks", 2), ("link", 1), ("epochs", 1), ("images", 64 * options.ranks)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            parser.error(
                f"--{name} must be at least {least}"
                + (", one batch a rank" if name == "images" else "")
            )
    if options.data and not pathlib.Path(options.data).is_dir():
        parser.error(f"--data: there is no folder {options.data}")
    if not pathlib.Path(options.output).resolve().parent.is_dir():
        parser.error(
            f"--output: there is no folder {pathlib.Path(options.output).resolve().parent}"
        )
    if not options.check:
        from horovod_compress import get_compressor

        for spec in options.specs:
            try:
                if spec not in HOROVODS_OWN:
                    get_compressor(spec)
            except ValueError as error:
                parser.error(str(error))
    return options


def two_hosts(options, console):
    """The command line that runs another one on two hosts; nothing where they are not wanted or
    cannot be made."""
    if options.hosts == 1:
        return []
    hosts = [sys.executable, "benchmarks/two_hosts.py", "--rate", f"{options.link}mbit", "--"]
    tried = subprocess.run([*hosts, "true"], cwd=ROOT, capture_output=True, text=True)
    if tried.returncode == 0:
        return hosts
    reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    if options.hosts == 2:
        sys.exit(f"scripts/demo: {reason}")
    console.print(
        f"{reason}\nso all ranks are on one host, and the link's share of the times is computed",
        markup=False,
        highlight=False,
    )
    return []


def command(options, events, on_two_hosts):
    """The job. Gloo, because every Horovod that scripts/setup builds has it."""
    ranks = ["horovodrun", "--gloo", "-np", options.ranks]
    if on_two_hosts:
        ranks += [
            "-H",
            f"a:{(options.ranks + 1) // 2},b:{options.ranks // 2}",
            "--network-interfaces",
            "eth0",
        ]
    else:
        ranks[0] = pathlib.Path(sys.executable).with_name("horovodrun")
    # Few parameters, so that plain Horovod, too, is done soon; and little computing beside them, as
    # on a GPU.
    train = [
        sys.executable,
        "examples/pytorch_images.py",
        "--events",
        events,
        "--width",
        26,
        "--strided",
    ]
    train += ["--images", options.images, "--seed", options.seed, "--lr", options.lr]
    train += ["--epochs", options.epochs] if options.epochs else []
    train += ["--data", pathlib.Path(options.data).resolve()] if options.data else []
    return [str(word) for word in [*ranks, *train, "--compression", *options.specs]]


def follow(job, path, console):
    """Shows the events of a job while it runs: bars on a terminal, elsewhere a line for each epoch.
    Returns one dict for each compression that finished: what the events `start` and `end` say, and
    `points`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    runs, current, task = [], None, None
    columns = [
        TextColumn("{task.description:34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[says]}"),
        TimeElapsedColumn(),
    ]
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        open(path) as events,
    ):
        waiting = progress.add_task("starting the ranks", total=None, says="")
        while True:
            ended = job.poll() is not None
            for line in whole_lines(events):
                event = json.loads(line)
                kind = event.pop("event")
                if kind == "data":
                    progress.remove_task(waiting)
                    console.print(
                        f"{event['ranks']} ranks, {event['images']} images of {event['name']}, "
                        f"{event['epochs']} epochs",
                        highlight=False,
                    )
                elif kind == "start":
                    current = {**event, "points": []}
                    task = progress.add_task(event["spec"], total=event["steps"], says="")
                elif kind == "end":
                    progress.stop_task(task)
                    runs.append(current)
                else:
                    progress.update(task, completed=event["step"])
                if kind == "point":
                    current["points"].append(event)
                    progress.update(task, says=f"accuracy {100 * event['accuracy']:.2f} %")
                    if event["ends_epoch"] and not console.is_terminal:
                        console.print(
                            f"{current['spec']}: epoch {event['epoch']}, test accuracy "
                            f"{100 * event['accuracy']:.2f} %, "
                            f"{event['bytes'] / 1e6:.1f} MB sent, {event['seconds']:.1f} s",
                            highlight=False,
                        )
            if ended:
                return runs
            time.sleep(0.1)


def whole_lines(file):
    """The lines that were written since the last call; one that is not whole yet is left for the
    next."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield line


def over_link(run, mbits):
    """A run on one host, as if the bytes of each rank had gone over a link as well: its seconds are
    computed then."""
    points = [
        {**point, "seconds": point["seconds"] + 8 * point["bytes"] / (1e6 * mbits)}
        for point in run["points"]
    ]
    return {**run, "points": points}


def target_of(runs):
    """The accuracy at which times are compared: a little below what `none` ends with. None if it
    was not run."""
    return next(
        (run["points"][-1]["accuracy"] - BEHIND / 100 for run in runs if run["spec"] == "none"),
        None,
    )


def seconds_to(run, target):
    """When a run was first seen at an accuracy; None if never."""
    return next((point["seconds"] for point in run["points"] if point["accuracy"] >= target), None)


def table(runs, options, measured):
    from rich import box
    from rich.table import Table

    target = target_of(runs)
    where = f"two hosts, a link of {options.link} Mbit/s" if measured else "one host"
    shown = Table(
        title=f"the same network of {runs[0]['parameters']:,} parameters, seed and epochs; {where}",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("compression", overflow="fold")
    star = "" if measured else " *"
    titles = ["accuracy", "MB sent", "ratio", f"ms a step{star}", f"seconds{star}"]
    titles += [f"s to {100 * target:.2f} %{star}"] if target else []
    for title in titles:
        shown.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        end = run["points"][-1]
        row = [
            run["spec"],
            f"{100 * end['accuracy']:.2f} %",
            f"{end['bytes'] / 1e6:,.1f}",
            f"{4 * run['parameters'] * run['steps'] / end['bytes']:,.0f}",
            f"{1e3 * end['seconds'] / run['steps']:.1f}",
            f"{end['seconds']:.1f}",
        ]
        if target:
            reached = seconds_to(run, target)
            row.append("never" if reached is None else f"{reached:.1f}")
        shown.add_row(*row)
    shown.caption = (
        "accuracy: the whole test set; MB sent: by each rank, everything counted; the clock "
        "stands still for tests"
    )
    if not measured:
        shown.caption += (
            f"\n* computed: measured on this one host, plus the MB sent at {options.link} Mbit/s"
        )
    return shown


def conclusions(runs):
    """A sentence about each compression: what it gains and loses against `none`."""
    target = target_of(runs)
    if target is None:
        return
    none = next(run for run in runs if run["spec"] == "none")
    for run in runs:
        if run is none:
            continue
        points = 100 * (run["points"][-1]["accuracy"] - none["points"][-1]["accuracy"])
        reached = seconds_to(run, target)
        gain = (
            f"{seconds_to(none, target) / reached:.1f} times sooner at" if reached else "never at"
        )
        end = f"and {points:+.2f} points at the end, against none, with one seed"
        yield f"{run['spec']}: {gain} {100 * target:.2f} %, {end}"


def draw(runs, options, measured):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for run in runs:
        scores = [100 * point["accuracy"] for point in run["points"]]
        (line,) = left.plot(
            [point["seconds"] for point in run["points"]], scores, linewidth=1.6, label=run["spec"]
        )
        right.plot(
            [point["bytes"] / 1e6 for point in run["points"]],
            scores,
            linewidth=1.6,
            color=line.get_color(),
        )
    how = "measured on two hosts" if measured else "computed from one host's and the bytes"
    left.set_title(f"Over seconds at {options.link} Mbit/s, {how}", loc="left", fontsize=11)
    left.set(xlabel="seconds of training", ylabel="test accuracy, %")
    right.set_title("Over what each rank sent", loc="left", fontsize=11)
    right.set(xlabel="MB (logarithmic)", xscale="log")
    left.legend(frameon=False, loc="lower right")
    top = max(100 * point["accuracy"] for run in runs for point in run["points"])
    # Where the runs differ; the first steps are below.
    left.set_ylim(top - 15, top + 1)
    if target_of(runs):
        for axes in (left, right):
            axes.axhline(100 * target_of(runs), color="0.6", linewidth=0.8, linestyle="--")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.output, dpi=130)


if __name__ == "__main__":
    main()
