"""hvdcompress plan: predicts a step's time and bytes on a network, for several numbers of ranks."""

import argparse
import functools
from typing import Any, Dict, List, Sequence, Union

from ..compressors.advice import ADVICE
from . import arguments, loads, prediction
from .cost import MOST_RANKS, Network
from .place import add_device
from .printing import Columns, console, digits, table, with_progress, write_json

_COLUMNS: Columns = {
    "ranks": lambda found: str(found["ranks"]),
    "spec": lambda found: found["spec"],
    "MB\nsent": lambda found: f"{found['bytes_sent'] / 1e6:.2f}",
    "MB\nreceived": lambda found: f"{found['bytes_received'] / 1e6:.2f}",
    "MB on\nlink": lambda found: f"{found['link_bytes'] / 1e6:.2f}",
    "work\nms": lambda found: f"{1e3 * found['work_seconds']:.1f}",
    "step\nms": lambda found: f"{1e3 * found['step_seconds']:.1f}",
    "of none": lambda found: f"{found['of_none']:.3f}",
}

_NOTES = (
    "MB sent, received: what a rank hands to collectives in a step and gets back, as stats() says",
    "MB on link: what crosses a rank's link in a step, each way",
    "work: encode and decode, measured on this processor, or with --device on its GPU",
    "step: backward and exchange, computed, after a warm-up; of none: over the step with none",
    "All is dense where the payloads of all ranks would be more bytes.",
    "The gradients are random. adacomp, variance and strom send less of real ones.",
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict a step's time and bytes on a network that you name",
        description="Predicts the time and the bytes of a training step with several compressions, "
        "for one or more numbers of ranks. It measures each compression on this machine and "
        "computes the exchange. It needs no other ranks and no network.",
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=_ranks_or_spec,
        default=[],
        metavar="N",
        help="numbers of ranks (default: those of two machines, or of --network)",
    )
    add_prediction(parser)
    network = parser.add_mutually_exclusive_group()
    network.add_argument(
        "--link",
        type=arguments.rate,
        metavar="RATE",
        help="speed of each rank's link, such as 100mbit or 10gbit (default: 1gbit)",
    )
    network.add_argument(
        "--network",
        metavar="FILE",
        help="a network measured by `hvdcompress check --json FILE`",
    )
    parser.add_argument(
        "--latency",
        type=arguments.number,
        metavar="MS",
        help="milliseconds that a message takes between two machines (default: 0.1)",
    )
    parser.add_argument(
        "--library",
        choices=("gloo", "mpi"),
        default="gloo",
        help="what Horovod runs on; small messages pass all ranks in turn (gloo) or a tree of them "
        "(mpi) (default: gloo)",
    )
    parser.add_argument(
        "--local-size",
        type=arguments.whole(1),
        default=1,
        metavar="L",
        help="ranks on each machine, for hosts=true (default: 1)",
    )
    arguments.add_plot(parser, "draw time and bytes over the number of ranks")
    parser.set_defaults(run=_run, parser=parser)


def add_prediction(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that every prediction takes."""
    parser.add_argument(
        "specs",
        nargs="*",
        metavar="SPEC",
        help="compressions to compare with none and fp16 "
        f"(default: {' '.join(prediction.DEFAULT)})",
    )
    model = parser.add_mutually_exclusive_group()
    arguments.add_model(model)
    model.add_argument(
        "--parameters",
        type=arguments.parameters,
        metavar="N",
        help="in place of --model: the number of a model's parameters, such as 25.6M",
    )
    parser.add_argument(
        "--tensors",
        type=arguments.whole(1),
        metavar="N",
        help="with --parameters: the number of tensors (default: one for each million parameters, "
        "at least 16)",
    )
    parser.add_argument(
        "--backward",
        type=arguments.number,
        default=0.0,
        metavar="MS",
        help="milliseconds of a backward pass, which the exchange overlaps with (default: 0)",
    )
    add_device(parser)
    arguments.add_json(parser)


def model_of(options: argparse.Namespace) -> loads.Model:
    """The model that --parameters or --model names."""
    if options.tensors and options.tensors > (options.parameters or 0):
        options.parser.error("--tensors: give --parameters, and at least as many of them")
    if options.parameters:
        return loads.Model.of_size(options.parameters, options.tensors)
    return loads.Model.known(options.model)


def _ranks_or_spec(text: str) -> Union[int, str]:
    """A number of ranks; or a SPEC, because those may follow the numbers."""
    return text if text[:1].isalpha() else arguments.whole(2)(text)


def _run(options: argparse.Namespace) -> None:
    # Specs may follow the numbers.
    options.specs += [spec for spec in options.ranks if isinstance(spec, str)]
    counts = sorted({count for count in options.ranks if isinstance(count, int)})
    refuse = options.parser.error
    if options.network and options.latency is not None:
        refuse("--latency: not allowed with argument --network, which was measured")
    try:
        compressors = prediction.compressors_of(options.specs)
        found = Network.read(options.network) if options.network else None
    except ValueError as error:
        refuse(str(error))
    counts = counts or [found.ranks if found else 2 * options.local_size]
    if counts[-1] > MOST_RANKS:
        refuse(f"--ranks: must be at most {MOST_RANKS}")
    for ranks in counts:
        if ranks % options.local_size:
            refuse(f"--local-size: {ranks} ranks are not hosts of {options.local_size}")
    model, rate = model_of(options), options.link or 1e9
    latency = 1e-3 * (0.1 if options.latency is None else options.latency)
    gradients = model.gradients()
    found_loads = {
        spec: loads.measured(
            compressors[spec], model, gradients, counts, options.local_size, options.device
        )
        for spec in with_progress(compressors)
    }

    def network(ranks: int, factor: float) -> Network:
        links = found.faster(factor) if found else Network.of_link(factor * rate, latency)
        return links.among(ranks, rings=options.library == "gloo")

    known = {"library": options.library, **({} if found else {"link_bits_per_second": rate})}
    runs = [
        {
            **prediction.predict(
                model,
                {spec: its[i] for spec, its in found_loads.items()},
                functools.partial(network, ranks),
                1e-3 * options.backward,
            ),
            **known,
        }
        for i, ranks in enumerate(counts)
    ]
    several = prediction.by_ranks(runs)
    if options.plot:
        prediction.plot(several, _title(runs[0]), options.plot)
    if not write_json({**several, **known} if len(runs) > 1 else runs[0], options.json):
        show_predictions(runs)


def show_predictions(runs: Sequence[Dict[str, Any]]) -> None:
    """Prints one table for all numbers of ranks, and what follows from it.

    Args:
        runs: what `prediction.predict` returns, by ascending number of ranks, with
            "link_bits_per_second" where the network was not measured.
    """
    groups = [[{"ranks": run["ranks"], **found} for found in run["predictions"]] for run in runs]
    said = _what_pays(runs[0]) if len(runs) == 1 else _from_where_dense_pays(runs)
    said += _recommended([found["spec"] for found in runs[0]["predictions"]])
    shown = table(_COLUMNS, *groups, left=("spec",))
    console().print(_title(runs[0]), shown, *_NOTES, "", *said, sep="\n")


def _title(run: Dict[str, Any]) -> str:
    """Of the table and of the plot: model, network and backward pass."""
    backward, rate = 1e3 * run["backward_seconds"], run.get("link_bits_per_second")
    return "; ".join(
        [
            f"{run['model']} of {digits(run['parameters'] / 1e6)} million parameters",
            f"links of {_shown_rate(rate)}" if rate else "the network as it was measured",
            f"backward {digits(backward)} ms" if backward else "no backward to hide behind",
        ]
    )


def _recommended(specs: Sequence[str]) -> List[str]:
    """Lines that say when which of these is recommended, and what is for Adam, which is not
    predicted."""
    uses = [each for each in ADVICE if each.every is not None or each.spec in specs]
    lines = [f"  {each.situation}: {each.use}".replace("`", "") for each in uses]
    return ["", "Accuracy is another matter. Recommended (docs/choose.md):", *lines]


def _what_pays(run: Dict[str, Any]) -> List[str]:
    best, factor, rate = run["best"], run["break_even"], run.get("link_bits_per_second")
    pays = best == run["predictions"][0]["spec"]
    said = f"{best} waits least" if pays else "no compression pays here"
    if factor:
        from_rate = _shown_rate(rate * factor) if rate else f"{digits(factor)} times this rate"
        said += f"; none is as fast as {best} from {from_rate} on"
    else:
        said += f"; none is {'always' if factor == 0 else 'never'} as fast as {best}"
    return [said]


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
    return f"{digits(rate / 1e9)} Gbit/s" if rate >= 1e9 else f"{digits(rate / 1e6)} Mbit/s"
