"""The command line tool, which lists compressions and measures them on a model's gradients on this machine."""
import argparse
import functools
import importlib.util
import inspect
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional, Sequence

import numpy as np

from . import available, bench, get_compressor, kernels
from .models import MODELS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_EPILOG = """\
gradients of your own: save them with NumPy, one entry a tensor; with several steps entries step/name, in any order:

  entries = {f"{step}/{name}": array for step, named in enumerate(steps) for name, array in named.items()}
  numpy.savez("gradients.npz", **entries)

With one step the same gradients are used in every step. Without --gradients they are random: normal numbers whose scale
is log-normal by row; a few sets take turns.

one core: taskset -c 0 hvdcompress bench
"""

_COLUMNS = {  # {title: function that formats a result}
    "spec": lambda result: result["spec"],
    "collective": lambda result: result["collective"],
    "ratio": lambda result: _digits(result["ratio"]),
    "kB/step": lambda result: _digits(result["bytes_per_step"] / 1e3),
    "encode\nms": lambda result: f"{1e3 * result['encode_seconds']:.2f}",
    "decode\nms": lambda result: f"{1e3 * result['decode_seconds']:.2f}",
    "GB/s": lambda result: _digits(result["gradient_bytes_per_second"] / 1e9),
    "×\nstreaming": lambda result: _digits(result["times_streaming"]),
    "error": lambda result: f"{result['error']:.3f}" + ("*" if result["residual"] else ""),
}

_NOTES = (
    "ratio: float32 bytes of all gradients / all bytes that a rank sends, frames and carriers included",
    "encode: from the first gradient to the last framed payload; decode: checks, decodes and adds the payloads of all ranks, of every tensor "
    "(where payloads are summed on the way: decodes their sum), and ends the step; both are medians, and there is no network: a copy takes "
    "its part and is not counted",
    "GB/s: of gradient, through encode and decode",
    "× streaming: encode and the decode of one payload, over the time to read and write the gradient, the algorithm's state and the payload once",
    "error: ‖mean over ranks − gradient‖ / ‖gradient‖ of the first step, when no residual and no momentum adds to the gradient yet; *: what is "
    "missing stays in a residual and is sent later",
)


def main(argv: Optional[Sequence[str]] = None) -> None:
    options = _parser().parse_args(argv)
    for module in ["rich"] + ["matplotlib"] * bool(getattr(options, "plot", None)):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"hvdcompress needs {module}: pip install 'horovod-compress[cli]'")
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hvdcompress", description="Gradient compression for unmodified Horovod.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    help = "lists all compressions, or what some of them are and what options they have"
    info = commands.add_parser("info", help=help, description=f"hvdcompress info {help}.")
    info.add_argument("ids", nargs="*", metavar="ID")
    info.add_argument("--json", action="store_true", help="print it as JSON")
    info.set_defaults(run=_info, parser=info)

    help = "measures compressions on a model's gradients"
    description = f"hvdcompress bench {help}: bytes, time and error of a step."
    raw = argparse.RawDescriptionHelpFormatter
    measure = commands.add_parser("bench", help=help, description=description, epilog=_EPILOG, formatter_class=raw)
    add = measure.add_argument
    add("specs", nargs="*", metavar="SPEC", help="such as dgc:ratio=0.01 (default: all ids, with their defaults)")
    add("--model", choices=MODELS, default="resnet50", help="whose gradients' shapes to use (default: resnet50)")
    add("--gradients", metavar="FILE.npz", help="gradients of your own, instead of a model's")
    add("--ranks", type=_whole, default=2, help="how many ranks' payloads are decoded (default: 2)")
    add("--steps", type=_whole, default=10, help=f"measured steps, after {bench.WARMUP} others (default: 10)")
    add("--seed", type=functools.partial(_whole, least=0), default=0, help="of the random gradients (default: 0)")
    add("--plot", metavar="FILE.png", type=_output, help="draw ratio against time")
    add("--json", metavar="FILE", type=_output, help="write the results as JSON")
    add("--markdown", action="store_true", help="print the table as Markdown")
    measure.set_defaults(run=_bench, parser=measure)
    return parser


def _whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}")
    return int(text)


def _output(text: str) -> str:
    if not pathlib.Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {pathlib.Path(text).parent}")
    return text


def _console() -> "Console":
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 140)


def _info(options: argparse.Namespace) -> None:
    try:
        classes = {str(cls.id): cls for cls in (type(get_compressor(spec)) for spec in options.ids or available())}
    except ValueError as error:
        options.parser.error(str(error))
    chosen = {id: available()[id] for id in classes}
    console = _console()
    if options.json:
        print(json.dumps(chosen, indent=2))
    elif not options.ids:
        console.print(_table(("id", "collective", "paper"), [(id, about["collective"], about["paper"]) for id, about in chosen.items()]))
    for id, about in chosen.items() if options.ids and not options.json else ():
        console.print(f"{id} · {about['collective']} · {about['paper']}")
        console.print((inspect.getdoc(classes[id]) or "").partition("\n\n")[0].replace("\n", " "))
        lines = [(name, _spelled(found["default"]), found["values"], found["doc"]) for name, found in about["options"].items()]
        console.print(_table(("option", "default", "values", "meaning"), lines) if lines else "no options", end="\n\n")


def _spelled(value: Any) -> str:
    """A value as a spec spells it."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(_spelled, value)) or "-"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    columns = [Column(title, justify="right" if title in right else "left", overflow="fold") for title in titles]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*row)
    return table


def _bench(options: argparse.Namespace) -> None:
    try:
        compressors = {spec: get_compressor(spec) for spec in options.specs or available()}
        if options.gradients:
            name, gradients = options.gradients, bench.load_gradients(options.gradients)
        for compressor in compressors.values():  # so that errors show before the long run
            bench.measure(compressor, [{"w": np.eye(40, dtype=np.float32)}], options.ranks, 1)
    except ValueError as error:
        options.parser.error(str(error))
    results = []
    with _progress() as progress:
        task = progress.add_task("preparing gradients", total=len(compressors) * (bench.WARMUP + options.steps))
        if not options.gradients:
            name, gradients = options.model, bench.random_gradients(MODELS[options.model](), options.seed)
        for spec, compressor in compressors.items():
            progress.update(task, description=spec)
            measured = bench.measure(compressor, gradients, options.ranks, options.steps, functools.partial(progress.advance, task))
            results.append({"spec": spec, **measured})
    run = {
        "gradients": name, "tensors": len(gradients[0]), "floats": sum(array.size for array in gradients[0].values()),
        "ranks": options.ranks, "steps": options.steps, "kernels": kernels.backend, "results": results,
    }
    _report(run, options.markdown)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(run, indent=2) + "\n")
    if options.plot:
        _plot(run, options.plot)


def _title(run: Dict[str, Any]) -> str:
    shown = "{gradients}: {tensors} tensors, {millions} M floats; {ranks} ranks, {steps} steps, {kernels} kernels"
    return shown.format(**run, millions=_digits(run["floats"] / 1e6))


def _report(run: Dict[str, Any], markdown: bool) -> None:
    rows = [[shown(result) for shown in _COLUMNS.values()] for result in run["results"]]
    if markdown:
        titles = [title.replace("\n", " ") for title in _COLUMNS]
        rows = [titles, ["---", "---", *["---:"] * (len(titles) - 2)], *rows]
        lines = [_title(run), "", *(f"| {' | '.join(row)} |" for row in rows), "", *(f"- {note}" for note in _NOTES)]
        print(*lines, sep="\n")
    else:
        _console().print(_title(run), _table(_COLUMNS, rows, right=list(_COLUMNS)[2:]), *_NOTES, sep="\n")


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _plot(run: Dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for collective in sorted({result["collective"] for result in run["results"]}):
        points = [result for result in run["results"] if result["collective"] == collective]
        work = [1e3 * (point["encode_seconds"] + point["decode_seconds"]) for point in points]
        axes.scatter(work, [point["ratio"] for point in points], label=collective)
        for x, point in zip(work, points):
            axes.annotate(point["spec"], (x, point["ratio"]), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="encode + decode, ms", ylabel="ratio on the wire")
    axes.set_title(_title(run), loc="left", fontsize=10)
    axes.margins(x=0.2, y=0.1)  # room for the labels
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
