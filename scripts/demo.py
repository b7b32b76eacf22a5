"""Runs examples/pytorch_images.py under horovodrun for several compressions, shows how it goes, then a table and a picture.

scripts/demo calls this once everything is installed.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = 100e6  # bit/s
HOROVODS_OWN = ("none", "fp16")


def main():
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Trains with and without compression and compares.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="default: 2, or 20 with the few images of the digits")
    parser.add_argument(
        "--specs", nargs="+", metavar="SPEC", default=["none", "fp16", "dgc:ratio=0.01", "dgc:ratio=0.001"],
        help="none and fp16 are Horovod's own; others are specs such as dgc:ratio=0.001,warmup_steps=300,values=fp16",
    )
    parser.add_argument("--data", help="folder of IDX files; default: Fashion-MNIST if installed, else scikit-learn's digits")
    parser.add_argument("--images", type=int, default=40000, help="train on the first so many images (default: 40000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--output", default="demo.png", help="the picture (default: demo.png)")
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)  # before anything is installed
    options = parser.parse_args()
    for name in ("ranks", "epochs"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.images < 64 * options.ranks:
        parser.error(f"--images must be at least {64 * options.ranks}, one batch a rank")
    if options.data and not pathlib.Path(options.data).is_dir():
        parser.error(f"--data: there is no folder {options.data}")
    if not pathlib.Path(options.output).resolve().parent.is_dir():
        parser.error(f"--output: there is no folder {pathlib.Path(options.output).resolve().parent}")
    if options.check:
        return

    from rich.console import Console

    from horovod_compress import get_compressor

    for spec in options.specs:
        try:
            if spec not in HOROVODS_OWN:
                get_compressor(spec)
        except ValueError as error:
            parser.error(str(error))

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        events, log = pathlib.Path(folder, "events"), pathlib.Path(folder, "log")
        events.touch()
        with open(log, "wb") as output:
            job = subprocess.Popen(command(options, events), cwd=ROOT, env=environment(), stdout=output, stderr=output)
        try:
            runs = follow(job, events, console)
        finally:
            job.terminate()
            job.wait()
        if job.returncode and len(runs) < len(options.specs):
            console.print(f"[red]training stopped with exit status {job.returncode}[/red]; the end of what it printed:")
            printed = log.read_text(errors="replace")
            console.print(printed[max(printed.rfind("Traceback"), 0) :][-6000:], markup=False, highlight=False)
            sys.exit(1)
    console.print(table(runs))
    draw(runs, options.output)
    console.print(f"picture: {options.output}")


def command(options, events):
    train = [sys.executable, "examples/pytorch_images.py", "--events", str(events)]
    train += ["--epochs", str(options.epochs)] if options.epochs else []
    train += ["--images", str(options.images), "--seed", str(options.seed), "--lr", str(options.lr), "--compression", *options.specs]
    train += ["--data", os.path.abspath(options.data)] if options.data else []
    return [str(pathlib.Path(sys.executable).with_name("horovodrun")), "-np", str(options.ranks), *train]


def environment():
    # Open MPI would pin the ranks of a small machine to the same core.
    return {**os.environ, "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def follow(job, path, console):
    """Shows the events of a job while it runs; returns one dict for each compression that finished."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    runs, current, task = [], None, None
    columns = [TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[says]}")]
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress, open(path) as events:
        waiting = progress.add_task("starting the ranks", total=None, says="")
        while True:
            ended = job.poll() is not None
            for line in iter(events.readline, ""):
                event = json.loads(line)
                kind = event.pop("event")
                if kind == "data":
                    progress.remove_task(waiting)
                    console.print(f"{event['ranks']} ranks, {event['images']} images of {event['name']}")
                elif kind == "start":
                    current = {**event, "points": []}
                    task = progress.add_task(event["spec"], total=event["steps"], says="")
                elif kind == "end":
                    runs.append({**current, **event})
                    progress.update(task, completed=current["steps"], says=f"accuracy {event['accuracy']:.3f}")
                else:
                    progress.update(task, completed=event["step"])
                    if kind == "point":
                        current["points"].append(event)
                        progress.update(task, says=f"accuracy {event['accuracy']:.3f}")
            if ended:
                return runs
            time.sleep(0.1)


def table(runs):
    from rich.table import Table

    shown = Table(title="the same network, seeds and epochs")
    shown.add_column("compression")
    for title in ("accuracy", "kB/step", "ratio", "step", "at 100 Mbit/s *"):
        shown.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        shown.add_row(
            run["spec"], f"{100 * run['accuracy']:.2f} %", f"{run['bytes_per_step'] / 1e3:,.1f}", f"{run['ratio']:,.0f}",
            f"{1e3 * run['step_seconds']:.1f} ms", f"{8e3 * run['bytes_per_step'] / LINK:,.1f} ms",
        )
    shown.caption = (
        "accuracy: whole test set; kB/step: all that one rank sends;\n"
        "step: median, measured here; * computed from the bytes"
    )
    return shown


def draw(runs, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run in runs:
        steps = [point["step"] for point in run["points"]]
        label = f"{run['spec']}  ({run['ratio']:.0f}×)"
        (line,) = left.plot(steps, [100 * point["accuracy"] for point in run["points"]], label=label, linewidth=1.6)
        right.plot(steps, [point["bytes"] / 1e6 for point in run["points"]], color=line.get_color(), linewidth=1.6)
    left.set(xlabel="step", ylabel="test accuracy, %")
    left.set_title("Test accuracy", loc="left")
    right.set_title("Sent by each rank so far", loc="left")
    right.set(xlabel="step", ylabel="MB (logarithmic)", yscale="log")
    left.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
