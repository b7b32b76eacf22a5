"""Predicted messages of decentralized training, for `hvdcompress plan`."""

from typing import Any, Dict, Sequence

from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..engine.gossip import DEFAULT, MEASURED, Gossip, compressor_of_messages
from ..engine.topology import Topology
from ..transport.loopback import Loopback
from .loads import Model
from .printing import console, digits, progress_bar, table

_COLUMNS = ("ranks", "spec", "α", "bound", "MB\nsent", "of none's\nallreduce")
# Of which eigenvalues are computed in a second.
MOST_RANKS = 1024
_NOTES = (
    "MB sent: messages to all neighbors in a step. Of none's allreduce: over what a ring allreduce "
    "of float32 sends",
    "α: ‖C(z) − z‖/‖z‖ of random updates. bound: below it DCD-PSGD is known to converge; it is far "
    "from tight, and α above 1 diverges. choco trains with any α below 1, where its step is the "
    "smaller the nearer α is to 1",
    "See docs/decentralized.md",
)


def predicted(
    compressors: Dict[str, Compressor],
    model: Model,
    counts: Sequence[int],
    topology: str,
) -> Dict[str, Any]:
    """Messages of DCD-PSGD with each compression, and with that of messages by default, for each
    number of ranks.

    Args:
        compressors: by spec.
        model: whose parameters travel.
        counts: numbers of ranks.
        topology: "ring", "torus" or "complete".

    Returns:
        A JSON-able dict: "decentralized", dicts of "topology", "ranks", "neighbors", "rho", "mu",
        "bound", "spec", "alpha", and "bytes_sent", of a rank in a step; and "refused", {spec: why
        it cannot serve} of those that are left out.
    """
    measured, refused, gradients = {}, {}, model.gradients()[0]
    serving = {**compressors, DEFAULT: get_compressor(DEFAULT)}
    with progress_bar() as progress:
        for spec in progress.track(serving, description="messages to neighbors"):
            try:
                messages = compressor_of_messages(serving[spec])
            except ValueError as error:
                refused[spec] = str(error)
                continue
            # The other rank never comes: what the first sends is all that is looked at.
            transport = Loopback.group(2)[0]
            gossip = Gossip(messages, "dcd", 1.0, Topology("ring", 2), transport, model.shapes)
            gossip.begin({name: 0 * x.reshape(-1) for name, x in gradients.items()})
            gossip.steps = MEASURED - 1
            gossip.start({name: x.reshape(-1) for name, x in gradients.items()})
            measured[spec] = gossip.alpha, model.factor * gossip.stats()["bytes_sent"]
    graphs = [Topology(topology, ranks) for ranks in counts]
    predictions = [
        {
            "topology": topology,
            "ranks": graph.size,
            "neighbors": graph.degree,
            "rho": graph.rho,
            "mu": graph.mu,
            "bound": graph.dcd_bound,
            "spec": spec,
            "alpha": alpha,
            "bytes_sent": graph.degree * sent,
        }
        for graph in graphs
        for spec, (alpha, sent) in measured.items()
    ]
    return {"decentralized": predictions, "refused": refused}


def show(found: Dict[str, Any], parameters: int) -> None:
    """Prints predictions as a table.

    Args:
        found: what `predicted` returns.
        parameters: of the model.
    """
    rows = [
        [
            str(each["ranks"]),
            each["spec"],
            digits(each["alpha"]),
            digits(each["bound"]),
            f"{each['bytes_sent'] / 1e6:.2f}",
            digits(each["bytes_sent"] / (2 * (each["ranks"] - 1) / each["ranks"] * 4 * parameters)),
        ]
        for each in found["decentralized"]
    ]
    rendered = table(_COLUMNS, rows, right=[title for title in _COLUMNS if title != "spec"])
    title = f"decentralized training; topology: {found['decentralized'][0]['topology']}"
    missing = [f"{spec} is left out: {why}" for spec, why in found["refused"].items()]
    console().print("", title, rendered, *missing, *_NOTES, sep="\n")
