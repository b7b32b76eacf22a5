"""The command line tool, which lists compressions, measures them, predicts what they bring, and
checks a cluster."""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import pathlib
import re
import sys
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterable,
    List,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from . import available, bench, get_compressor, kernels, loads, prediction, recording, report
from .cost import MOST_RANKS, Load, Network
from .models import MODELS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_EPILOG = """\
gradients of your own: save them with NumPy, one entry a tensor; with several steps entries
step/name, in any order:

  entries = {
      f"{step}/{name}": array for step, named in enumerate(steps) for name, array in named.items()
  }
  numpy.savez("gradients.npz", **entries)

With one step the same gradients are used in every step. Without --gradients they are random: normal
numbers whose scale is log-normal by row; a few sets take turns.

one core: taskset -c 0 hvdcompress bench
"""

_CHECK_EPILOG = """\
horovodrun -np 4 -H host1:2,host2:2 hvdcompress check --model resnet50 --json network.json
mpirun -np 4 -H host1:2,host2:2 hvdcompress check --million 25.6

It compares what is installed on all ranks, runs every algorithm on every transport against what as
many ranks in one process give, measures what collectives take, and predicts what a step takes with
each SPEC. Ends with status 1 where ranks differ or an algorithm fails. Alone, without a launcher,
it checks this machine. The network that it has measured serves `hvdcompress plan --network
network.json`.
"""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

_PLAN_COLUMNS = {
    # {title: function that formats a prediction}.
    "ranks": lambda found: str(found["ranks"]),
    "spec": lambda found: found["spec"],
    "MB\nsent": lambda found: f"{found['bytes_sent'] / 1e6:.2f}",
    "MB\nreceived": lambda found: f"{found['bytes_received'] / 1e6:.2f}",
    "MB on\nlink": lambda found: f"{found['link_bytes'] / 1e6:.2f}",
    "work\nms": lambda found: f"{1e3 * found['work_seconds']:.1f}",
    "step\nms": lambda found: f"{1e3 * found['step_seconds']:.1f}",
    "of none": lambda found: f"{found['of_none']:.3f}",
}

_PLAN_NOTES = (
    "sent, received: bytes that a rank hands to collectives in a step and gets back, as stats() "
    "counts them; on link: bytes that cross its link each way",
    "work: encode and decode, measured on this processor; step: backward and exchange, computed, "
    "after a warm-up; of none: over the step without compression",
    "Tensors go dense where the payloads of all ranks would be more bytes.",
    "The gradients are random. adacomp, variance and strom send less of real ones.",
)

_COLUMNS = {
    # {title: function that formats a result}.
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

_REPORTED = {
    # {title: function that formats a line of a report}.
    "tensor": lambda line: line["name"],
    "sent by": lambda line: line["compressor"] or "",
    "elements": lambda line: "" if line["numel"] is None else f"{line['numel']}",
    "kB/step": lambda line: _digits(line["bytes_sent"] / 1e3),
    "ratio": lambda line: _digits(line["ratio"]),
    "gradient\nnorm": lambda line: _digits(line["gradient_norm"]),
    "residual\nnorm": lambda line: _digits(line["residual_norm"]),
    "encode\nms": lambda line: f"{1e3 * line['encode_seconds']:.2f}",
    "wait\nms": lambda line: f"{1e3 * line['exchange_seconds']:.2f}",
    "decode\nms": lambda line: f"{1e3 * line['decode_seconds']:.2f}",
}

_NOTES = (
    "ratio: float32 bytes of all gradients / all bytes that a rank sends, frames and carriers "
    "included",
    "encode: from the first gradient to the last framed payload; decode: checks, decodes and adds "
    "the payloads of all ranks, of every tensor "
    "(where payloads are summed on the way: decodes their sum), and ends the step; both are "
    "medians, and there is no network: a copy takes "
    "its part and is not counted",
    "GB/s: of gradient, through encode and decode",
    "× streaming: encode and the decode of one payload, over the time to read and write the "
    "gradient, the algorithm's state and the payload once",
    "error: ‖mean over ranks − gradient‖ / ‖gradient‖ of the first step, when no residual and no "
    "momentum adds to the gradient yet; *: what is "
    "missing stays in a residual and is sent later",
)


class _Parser(argparse.ArgumentParser):
    """Its errors are one line, whatever files and arguments hold."""

    def error(self, message: str) -> NoReturn:
        super().error(report.printable(message))


def main(argv: Optional[Sequence[str]] = None) -> None:
    options = _parser().parse_args(argv)
    for module in ["rich"] + ["matplotlib"] * bool(getattr(options, "plot", None)):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"hvdcompress needs {module}: pip install 'horovod-compress[cli]'")
    try:
        options.run(options)
    # A file that cannot be written, or a disk that is full.
    except OSError as error:
        sys.exit(report.printable(f"hvdcompress: {error}"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hvdcompress", description="Gradient compression for unmodified Horovod.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    help = "lists all compressions, or what some of them are and what options they have"
    info = commands.add_parser("info", help=help, description=f"hvdcompress info {help}.")
    info.add_argument("ids", nargs="*", metavar="ID")
    _add_json(info)
    info.set_defaults(run=_info, parser=info)

    help = "measures compressions on a model's gradients"
    description = f"hvdcompress bench {help}: bytes, time and error of a step."
    raw = argparse.RawDescriptionHelpFormatter
    measure = commands.add_parser(
        "bench", help=help, description=description, epilog=_EPILOG, formatter_class=raw
    )
    add = measure.add_argument
    add(
        "specs",
        nargs="*",
        metavar="SPEC",
        help="such as dgc:ratio=0.01 (default: all ids, with their defaults)",
    )
    add(
        "--model",
        choices=MODELS,
        default="resnet50",
        help="whose gradients' shapes to use (default: resnet50)",
    )
    add("--gradients", metavar="FILE.npz", help="gradients of your own, instead of a model's")
    add("--ranks", type=_whole, default=2, help="how many ranks' payloads are decoded (default: 2)")
    add(
        "--steps",
        type=_whole,
        default=10,
        help=f"measured steps, after {bench.WARMUP} others (default: 10)",
    )
    add(
        "--seed",
        type=functools.partial(_whole, least=0),
        default=0,
        help="of the random gradients (default: 0)",
    )
    add("--plot", metavar="FILE.png", type=_picture, help="draw ratio against time")
    _add_json(measure)
    add("--markdown", action="store_true", help="print the table as Markdown")
    measure.set_defaults(run=_bench, parser=measure)
    _add_plan(commands)
    _add_check(commands)
    _add_report(commands)
    return parser


def _add_report(commands: Any) -> None:
    help = "shows what compression.record() has written, by tensor"
    shown = commands.add_parser("report", help=help, description=f"hvdcompress report {help}.")
    shown.add_argument("file", metavar="FILE", help="of JSON lines")
    shown.add_argument(
        "--plot", metavar="FILE.png", type=_picture, help="draw bytes, norms and times over steps"
    )
    _add_json(shown)
    shown.set_defaults(run=_show, parser=shown)


def _add_plan(commands: Any) -> None:
    help = "predicts the time and bytes of a step on a network"
    plan = commands.add_parser(
        "plan",
        help=help,
        description="Predicts the time and bytes of a training step with several compressions, for "
        "one or more numbers of ranks. Needs no other ranks: it measures each compression on this "
        "processor and computes the exchange.",
    )
    plan.add_argument(
        "--ranks",
        nargs="+",
        type=_ranks_or_spec,
        default=[],
        metavar="N",
        help="numbers of ranks (default: ranks of two hosts, or those of --network)",
    )
    _add_plan_options(plan)
    plan.set_defaults(run=_plan, parser=plan)
    # Without help, a command is not listed.
    scale = commands.add_parser(
        "scale", description="Deprecated: hvdcompress plan --ranks 2 4 8 … does the same."
    )
    scale.add_argument(
        "--ranks",
        type=functools.partial(_whole, least=2),
        default=10_000,
        metavar="N",
        help="the largest number of ranks (default: 10000)",
    )
    _add_plan_options(scale)
    scale.set_defaults(run=_scale, parser=scale)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    _add_prediction(parser)
    _add_network(parser)
    parser.add_argument(
        "--library",
        choices=("gloo", "mpi"),
        default="gloo",
        help="Horovod's library: gloo sends small messages along a ring, mpi along a tree "
        "(default: gloo)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", type=_picture, help="plot time and bytes over ranks"
    )


def _add_check(commands: Any) -> None:
    help = "checks a cluster, and says which compression would pay there: run it on all ranks"
    raw = argparse.RawDescriptionHelpFormatter
    check = commands.add_parser(
        "check",
        help=help,
        description=f"hvdcompress check {help}.",
        epilog=_CHECK_EPILOG,
        formatter_class=raw,
    )
    _add_prediction(check)
    check.set_defaults(run=_check, parser=check)


def _add_prediction(parser: argparse.ArgumentParser) -> None:
    default = " ".join(prediction.DEFAULT)
    parser.add_argument(
        "specs",
        nargs="*",
        metavar="SPEC",
        help=f"to compare with none and fp16 (default: {default})",
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        choices=MODELS,
        default="resnet50",
        help="whose gradients' shapes to use (default: resnet50)",
    )
    model.add_argument(
        "--million",
        type=functools.partial(_number, above=True),
        metavar="M",
        help="parameters of the model in millions, instead",
    )
    parser.add_argument(
        "--backward",
        type=_number,
        default=0.0,
        metavar="MS",
        help="milliseconds of a backward pass, behind which exchanges hide",
    )
    _add_json(parser)


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = parser.add_mutually_exclusive_group()
    network.add_argument(
        "--link",
        type=_rate,
        metavar="RATE",
        help="of each rank's link, bits a second, as 100mbit (default: 1gbit)",
    )
    network.add_argument(
        "--network",
        metavar="FILE",
        help="what `hvdcompress check --json FILE` has measured, instead of --link and --latency",
    )
    parser.add_argument(
        "--latency",
        type=_number,
        metavar="MS",
        help="milliseconds of a message between two hosts (default: 0.1)",
    )
    parser.add_argument(
        "--local-size",
        type=_whole,
        default=1,
        metavar="L",
        help="how many ranks a host has, for hosts=true (default: 1)",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=_output,
        help="write the results as JSON; -: to standard output, and nothing else",
    )


def _number(text: str, above: bool = False) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf and (float(text) or not above):
            return float(text)
    raise argparse.ArgumentTypeError(
        f"must be a number {'above 0' if above else 'of at least 0'}, not {text!r}"
    )


def _rate(text: str) -> float:
    """Bits a second."""
    match = re.fullmatch(r"([0-9.]+)([kmgt]?)bit", text.lower())
    with contextlib.suppress(ValueError):
        if match and float(match[1]):
            return float(match[1]) * _UNITS[match[2]]
    raise argparse.ArgumentTypeError(f"must be a rate above 0, as 100mbit or 2.5gbit, not {text!r}")


def _whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}")
    return int(text)


def _ranks_or_spec(text: str) -> Union[int, str]:
    """A number of ranks; or a SPEC, because those may follow the numbers."""
    return text if text[:1].isalpha() else _whole(text, least=2)


def _output(text: str) -> str:
    if not pathlib.Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {pathlib.Path(text).parent}")
    return text


def _picture(text: str) -> str:
    if pathlib.Path(text).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png, .pdf or .svg")
    return _output(text)


def _console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(
        markup=False, highlight=False, stderr=stderr, width=None if sys.stdout.isatty() else 140
    )


def _info(options: argparse.Namespace) -> None:
    try:
        classes = {
            str(cls.id): cls
            for cls in (type(get_compressor(spec)) for spec in options.ids or available())
        }
    except ValueError as error:
        options.parser.error(str(error))
    chosen = {id: available()[id] for id in classes}
    if _write_json(chosen, options.json):
        return
    console = _console()
    if not options.ids:
        console.print(
            _table(
                ("id", "collective", "paper"),
                [(id, about["collective"], about["paper"]) for id, about in chosen.items()],
            )
        )
    for id, about in chosen.items() if options.ids else ():
        console.print(f"{id} · {about['collective']} · {about['paper']}")
        console.print((inspect.getdoc(classes[id]) or "").partition("\n\n")[0].replace("\n", " "))
        lines = [
            (name, _spelled(found["default"]), found["values"], found["doc"])
            for name, found in about["options"].items()
        ]
        console.print(
            _table(("option", "default", "values", "meaning"), lines) if lines else "no options",
            end="\n\n",
        )


def _spelled(value: Any) -> str:
    """A value as a spec spells it."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(_spelled, value)) or "-"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _table(
    titles: Iterable[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    columns = [
        Column(title, justify="right" if title in right else "left", overflow="fold")
        for title in titles
    ]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*map(report.printable, row))
    return table


def _bench(options: argparse.Namespace) -> None:
    try:
        compressors = {spec: get_compressor(spec) for spec in options.specs or available()}
        if options.gradients:
            name, gradients = options.gradients, bench.load_gradients(options.gradients)
        # So that errors show before the long run.
        for compressor in compressors.values():
            bench.measure(compressor, [{"w": np.eye(40, dtype=np.float32)}], options.ranks, 1)
    except ValueError as error:
        options.parser.error(str(error))
    results = []
    with _progress() as progress:
        task = progress.add_task(
            "preparing gradients", total=len(compressors) * (bench.WARMUP + options.steps)
        )
        if not options.gradients:
            name, gradients = (
                options.model,
                bench.random_gradients(MODELS[options.model](), options.seed),
            )
        for spec, compressor in compressors.items():
            progress.update(task, description=spec)
            measured = bench.measure(
                compressor,
                gradients,
                options.ranks,
                options.steps,
                functools.partial(progress.advance, task),
            )
            results.append({"spec": spec, **measured})
    run = {
        "gradients": name,
        "tensors": len(gradients[0]),
        "floats": sum(array.size for array in gradients[0].values()),
        "ranks": options.ranks,
        "steps": options.steps,
        "kernels": kernels.backend,
        "results": results,
    }
    if options.plot:
        _plot(run, options.plot)
    if not _write_json(run, options.json):
        _report(run, options.markdown)


def _write_json(found: Any, path: Optional[str]) -> bool:
    """Writes what was found, where that was asked for. Returns whether standard output has it,
    which then is JSON and nothing else."""
    if path:
        text = json.dumps(found, indent=2) + "\n"
        sys.stdout.write(text) if path == "-" else pathlib.Path(path).write_text(text)
    return path == "-"


def _compressors_and_network(
    options: argparse.Namespace,
) -> Tuple[Dict[str, Any], Optional[Network]]:
    """What is to be predicted, and the network where it was measured."""
    if options.network and options.latency is not None:
        options.parser.error("--latency: not allowed with argument --network, which was measured")
    try:
        return prediction.compressors_of(options.specs), Network.read(
            options.network
        ) if options.network else None
    except ValueError as error:
        sys.exit(options.parser.error(str(error)))


def _link(options: argparse.Namespace) -> Tuple[float, float]:
    """Bits a second, and seconds of a message."""
    return options.link or 1e9, 1e-3 * (0.1 if options.latency is None else options.latency)


def _plan(options: argparse.Namespace) -> None:
    # Specs may follow the numbers.
    options.specs += [spec for spec in options.ranks if isinstance(spec, str)]
    compressors, found = _compressors_and_network(options)
    counts = sorted({count for count in options.ranks if isinstance(count, int)})
    counts = counts or [found.ranks if found else 2 * options.local_size]
    if counts[-1] > MOST_RANKS:
        options.parser.error(f"--ranks: must be at most {MOST_RANKS}")
    for ranks in counts:
        if ranks % options.local_size:
            options.parser.error(
                f"--local-size: {ranks} ranks are not hosts of {options.local_size}"
            )
    model, rate, latency = _model(options), *_link(options)
    measured = _measure_loads(options, compressors, model, counts)

    def network(ranks: int, factor: float) -> Network:
        links = found.faster(factor) if found else Network.of_link(factor * rate, latency)
        return links.among(ranks, rings=options.library == "gloo")

    runs = [
        prediction.predict(
            model,
            {spec: its[i] for spec, its in measured.items()},
            functools.partial(network, ranks),
            1e-3 * options.backward,
        )
        for i, ranks in enumerate(counts)
    ]
    several = prediction.by_ranks(runs)
    written = several if len(runs) > 1 else runs[0]
    written["library"] = options.library
    if not found:
        written["link_bits_per_second"] = rate
    if options.plot:
        prediction.plot(several, options.plot)
    if not _write_json(written, options.json):
        _show_predictions(runs, None if found else rate)


def _measure_loads(
    options: argparse.Namespace,
    compressors: Dict[str, Any],
    model: loads.Model,
    counts: Sequence[int],
) -> Dict[str, List[Load]]:
    """{spec: its load for each number of ranks}, measured behind a progress bar."""
    with _progress() as progress:
        # The most that one spec may take. Most take less.
        each = max(2, len(counts)) * (bench.WARMUP + loads.STEPS)
        task = progress.add_task("preparing gradients", total=len(compressors) * each)
        gradients, measured = model.gradients(), {}
        for done, (spec, compressor) in enumerate(compressors.items()):
            progress.update(task, description=spec, completed=done * each)
            advance = functools.partial(progress.advance, task)
            measured[spec] = loads.measured(
                compressor, model, gradients, counts, advance, options.local_size
            )
    return measured


def _scale(options: argparse.Namespace) -> None:
    """The earlier name of plan with several numbers of ranks."""
    hosts = options.ranks // options.local_size
    powers = [2**power for power in range(1, (hosts - 1).bit_length())]
    options.ranks = [*(options.local_size * power for power in powers), options.ranks]
    _plan(options)
    counts = " ".join(map(str, options.ranks))
    print(
        "hvdcompress scale is deprecated and will be removed: use hvdcompress plan, with the same "
        f"options and --ranks {counts}",
        file=sys.stderr,
    )


def _model(options: argparse.Namespace) -> loads.Model:
    return (
        loads.Model.of_size(options.million)
        if options.million
        else loads.Model.known(options.model)
    )


def _show_predictions(runs: Sequence[Dict[str, Any]], rate: Optional[float]) -> None:
    """Prints one table for all numbers of ranks, and what follows from it.

    Args:
        runs: what `prediction.predict` returns, by ascending number of ranks.
        rate: of links, bits a second; None where the network was measured.
    """
    first, backward = runs[0], 1e3 * runs[0]["backward_seconds"]
    title = "; ".join(
        [
            f"{first['model']} of {_digits(first['parameters'] / 1e6)} million parameters",
            f"links of {_shown_rate(rate)}" if rate else "the network as it was measured",
            f"backward {_digits(backward)} ms" if backward else "no backward to hide behind",
        ]
    )
    rows: List[List[str]] = []
    for run in runs:
        # An empty line between numbers of ranks.
        rows += [[""] * len(_PLAN_COLUMNS)] if rows else []
        rows += [
            [shown({"ranks": run["ranks"], **found}) for shown in _PLAN_COLUMNS.values()]
            for found in run["predictions"]
        ]
    table = _table(_PLAN_COLUMNS, rows, right=[title for title in _PLAN_COLUMNS if title != "spec"])
    said = _what_pays(first, rate) if len(runs) == 1 else _from_where_dense_pays(runs)
    _console().print(title, table, *_PLAN_NOTES, "", *said, sep="\n")


def _what_pays(run: Dict[str, Any], rate: Optional[float]) -> List[str]:
    best, factor = run["best"], run["break_even"]
    pays = best == run["predictions"][0]["spec"]
    said = f"{best} waits least" if pays else "no compression pays here"
    if factor:
        from_rate = _shown_rate(rate * factor) if rate else f"{_digits(factor)} times this rate"
        said += f"; none is as fast as {best} from {from_rate} on"
    else:
        said += f"; none is {'always' if factor == 0 else 'never'} as fast as {best}"
    return [said, *[f"Accuracy is another matter: see {best} in docs/algorithms.md"] * pays]


def _from_where_dense_pays(runs: Sequence[Dict[str, Any]]) -> List[str]:
    by_spec, last = prediction.by_ranks(runs)["by_spec"], runs[-1]["ranks"]
    return [
        f"{spec}: none is as fast from {its['dense_from']} ranks on"
        if its["dense_from"]
        else f"{spec}: faster than none with up to {last} ranks"
        for spec, its in by_spec.items()
        if spec not in prediction.BASELINES
    ]


def _shown_rate(rate: float) -> str:
    return f"{_digits(rate / 1e9)} Gbit/s" if rate >= 1e9 else f"{_digits(rate / 1e6)} Mbit/s"


def _check(options: argparse.Namespace) -> None:
    try:
        compressors = prediction.compressors_of(options.specs)
    except ValueError as error:
        options.parser.error(str(error))
    try:
        from . import check
    except ImportError as error:
        sys.exit(f"hvdcompress check needs Horovod with PyTorch: {error}")
    console = _console(stderr=options.json == "-")
    found = check.run(compressors, _model(options), 1e-3 * options.backward, console.print)
    if check.is_first() and not _write_json(found, options.json) and "predictions" in found:
        _show_predictions([found], None)
    if check.is_first():
        # One rank has no predictions: there is no network.
        well = "all is well" if "predictions" in found else "all is well, as far as one rank shows"
        console.print(f"\n{well}" if found["good"] else "\nsomething is wrong: see above")
    sys.exit(not found["good"])


def _show(options: argparse.Namespace) -> None:
    try:
        records = recording.read(options.file)
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    if not records:
        options.parser.error(f"{options.file}: no record yet")
    lines = report.by_tensor(records)
    if not _write_json(lines, options.json):
        first, last = records[0], records[-1]
        said = (
            f"{options.file}: {last['spec']['id']}, rank {last['rank']} of {last['size']}, steps "
            f"{first['step']} to {last['step']}, "
        )
        rows = [[shown(line) for shown in _REPORTED.values()] for line in lines]
        said = report.printable(f"{said}{len(records)} records")
        _console().print(said, _table(_REPORTED, rows, right=list(_REPORTED)[2:]), sep="\n")
    if options.plot:
        report.plot(records, options.plot)


def _title(run: Dict[str, Any]) -> str:
    shown = (
        "{gradients}: {tensors} tensors, {millions} M floats; {ranks} ranks, {steps} steps, "
        "{kernels} kernels"
    )
    return shown.format(**run, millions=_digits(run["floats"] / 1e6))


def _report(run: Dict[str, Any], markdown: bool) -> None:
    rows = [[shown(result) for shown in _COLUMNS.values()] for result in run["results"]]
    if markdown:
        titles = [title.replace("\n", " ") for title in _COLUMNS]
        rows = [titles, ["---", "---", *["---:"] * (len(titles) - 2)], *rows]
        lines = [
            _title(run),
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            *(f"- {note}" for note in _NOTES),
        ]
        print(*lines, sep="\n")
    else:
        _console().print(
            _title(run), _table(_COLUMNS, rows, right=list(_COLUMNS)[2:]), *_NOTES, sep="\n"
        )


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )


def _digits(number: Optional[float]) -> str:
    if number is None:
        return "-"
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
            axes.annotate(
                point["spec"],
                (x, point["ratio"]),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set(xscale="log", yscale="log", xlabel="encode + decode, ms", ylabel="ratio on the wire")
    axes.set_title(_title(run), loc="left", fontsize=10)
    axes.margins(x=0.2, y=0.1)  # room for the labels
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
