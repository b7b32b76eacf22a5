#!/usr/bin/env python3
"""Writes what of the documentation follows from the code: in docs/algorithms/ what each algorithm
does and its options, in docs/choose.md what is recommended, docs/reference/, and from docstrings
of modules the folders in docs/how-it-works.md and layouts in docs/wire-format.md. docs/index.md
shows the changes to a script that README.md and docs/start/ddp.md show.

It stands in its page between two comments, and what is written by hand around it stays. --check
writes nothing, and fails where a page is not current. Needs no framework.
"""

import argparse
import ast
import dataclasses
import inspect
import os
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    # Nothing is computed. Not where a test imports this, whose process has kernels of its own.
    os.environ.setdefault("HOROVOD_COMPRESS_KERNELS", "reference")

from horovod_compress.compressors import REGISTRY, collective_of  # noqa: E402
from horovod_compress.compressors.advice import ADVICE  # noqa: E402
from horovod_compress.compressors.globalrandk import SharedCoordinates  # noqa: E402
from horovod_compress.compressors.selective import (  # noqa: E402
    GatheringCompressor,
    SelectiveCompressor,
)
from horovod_compress.tools import cli  # noqa: E402
from horovod_compress.tools.info import spelled  # noqa: E402

BEGIN = "<!-- Written by scripts/pages.py from here on: change the code, and run that. -->"
END = "<!-- By hand from here on. -->"
# Modules whose public names are listed, with what each is for.
MODULES = {
    "horovod_compress": (
        "Specs, simulation, and errors, without a framework. It has the classes of all "
        "[algorithms](../algorithms/index.md) too, by which a spec can be written in Python."
    ),
    "horovod_compress.torch": "For Horovod with PyTorch, `import horovod_compress.torch as hvdc`.",
    "horovod_compress.torch.elastic": "Elastic jobs with PyTorch, `hvdc.elastic`.",
    "horovod_compress.tensorflow": (
        "For Horovod with TensorFlow and Keras, `import horovod_compress.tensorflow as hvdc`."
    ),
    "horovod_compress.tensorflow.elastic": "Elastic jobs with TensorFlow, `hvdc.elastic`.",
    "horovod_compress.ddp": (
        "For DistributedDataParallel, without Horovod, `from horovod_compress import ddp`."
    ),
    "horovod_compress.fsdp": (
        "For models that fully_shard has cut, without Horovod, `from horovod_compress import fsdp`."
    ),
}
# The folders, from those that import to those that are imported.
FOLDERS = (
    "tools",
    "torch",
    "tensorflow",
    "ddp",
    "fsdp",
    "torch_distributed",
    "torch_common",
    "session",
    "decentralized",
    "engine",
    "compressors",
    "transport",
    "protocol",
    "kernels",
)
# Parts of bodies, by the modules that encode them.
LAYOUTS = {"Fields": "quantization", "Columns": "columns", "Buckets": "buckets"}
# What an algorithm of another package is written with.
FOR_AUTHORS = (
    "compressors.base.Compressor",
    "compressors.selective.SelectiveCompressor",
    "compressors.selective.GatheringCompressor",
    "compressors.selective.ErrorFeedback",
    "compressors.base.Traits",
    "compressors.base.Step",
    "compressors.state.State",
    "compressors.state.Rollback",
    "compressors.options.option",
    "protocol.requests.Allreduce",
    "protocol.requests.ToReducer",
    "kernels.Encoded",
)


def table(titles, rows):
    """A table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def prose(text, indent=""):
    """A paragraph in lines of at most 100 columns. indent: of all lines but the first."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def sentence(text):
    return text[:1].upper() + text[1:] + "." * (not text.endswith("."))


def options(fields):
    """A table of options."""
    rows = [
        (
            f"`{field.name}`",
            "–" if field.default == () else f"`{spelled(field.default)}`",
            field.metadata["doc"],
            str(field.metadata["kind"]),
        )
        for field in fields
    ]
    return table(("option", "default", "meaning", "values"), rows)


def own_options(algorithm):
    """The fields of an algorithm without those that it shares with all that gather."""
    shared = {field.name for field in dataclasses.fields(GatheringCompressor)}
    return [field for field in dataclasses.fields(algorithm) if field.name not in shared]


def first_sentence(algorithm):
    return inspect.getdoc(algorithm).partition("\n\n")[0].replace("\n", " ")


def state_of(algorithm):
    """Bytes an element that a large matrix's state takes."""
    state = algorithm().init("w", (1024, 1024))
    return round(sum(array.nbytes for array in state.arrays.values()) / 2**20)


def paper_of(algorithm):
    """The paper, with a link where it is on arXiv."""
    link = r"[arXiv \1](https://arxiv.org/abs/\1)"
    return re.sub(r"arXiv (\d+\.\d+)", link, algorithm.traits.paper)


def algorithm_page(algorithm):
    payload = {
        "allgather": "gathered from all ranks, so the bytes that a rank receives grow with them",
        "allreduce": "summed by an allreduce, so the bytes of a rank hardly grow with the ranks",
    }[collective_of(algorithm())]
    nbytes, state = state_of(algorithm), "none"
    if issubclass(algorithm, SharedCoordinates):
        state = "none; with ratio or k, and not unbiased, 4 bytes an element"
    on_gpu = "stay there (PyTorch)" if algorithm.traits.on_device else "go through host memory"
    facts = [
        f"- **Payloads**: {payload}.",
        f"- **State**: {nbytes} bytes an element." if nbytes else f"- **State**: {state}.",
        f"- **Gradients on a GPU**: {on_gpu}.",
        f"- **Constructor**: `horovod_compress.{algorithm.__name__}(…)`.",
    ]
    if algorithm.traits.paper != "-":
        facts.insert(0, f"- **Paper**: {paper_of(algorithm)}.")
    parts = [inspect.getdoc(algorithm), "\n".join(prose(fact, "  ") for fact in facts)]
    own = own_options(algorithm)
    if own:
        parts += ["## Options", options(own)]
    if issubclass(algorithm, SelectiveCompressor):
        left_out = "" if issubclass(algorithm, GatheringCompressor) else ", but for `hosts`"
        parts.append(f"And the [options of all](index.md#options-of-all){left_out}.")
    return "\n\n".join(parts)


def index():
    """The table of all algorithms in docs/algorithms/index.md."""
    rows = [
        (
            f"[`{id}`]({id}.md)",
            first_sentence(algorithm),
            collective_of(algorithm()),
            str(state_of(algorithm) or "–"),
        )
        for id, algorithm in REGISTRY.items()
    ]
    parts = [
        table(("id", "what it does", "collective", "state, bytes an element"), rows),
        "## Options of all",
        "All but `none`, `fp16` and `bf16` have these; `hosts` only those that gather, not `demo`.",
        options(dataclasses.fields(GatheringCompressor)),
    ]
    return "\n\n".join(parts)


def recommended():
    rows = [(each.situation, each.use, each.measured) for each in ADVICE]
    return table(("your situation", "start with", "measured against none"), rows)


def changes():
    """The parts of README.md and docs/start/ddp.md on the site's first page."""
    parts = []
    for title, page in (("Horovod", "README.md"), ("DistributedDataParallel", "docs/start/ddp.md")):
        diff = re.search(r"(?ms)^```diff\n.*?^```$", (ROOT / page).read_text())
        assert diff, page
        parts += [f"With {title}:", diff[0]]
    return "\n\n".join(parts)


def docstring(path):
    """The paragraphs of a module's docstring, read from its source."""
    source = (ROOT / "horovod_compress" / path).read_text()
    return ast.get_docstring(ast.parse(source)).split("\n\n")


def folders():
    firsts = {name: docstring(f"{name}/__init__.py")[0].replace("\n", " ") for name in FOLDERS}
    rows = [(f"`{name}/`", sentence(text.partition(". ")[0])) for name, text in firsts.items()]
    return table(("folder of `horovod_compress`", "what is in it"), rows)


def layouts():
    """The layouts of bytes, from the second paragraph of modules' docstrings."""
    return "\n\n".join(
        f"### {title}\n\n{docstring(f'kernels/reference/{module}.py')[1]}"
        for title, module in LAYOUTS.items()
    )


def public_names(module):
    """The names in a module's __all__, read from its source, because frameworks may be missing."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    (names,) = (
        node.value.elts
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [each.value for each in names if isinstance(each, ast.Constant)]


def api():
    """The reference of public names, which the site fills in from their docstrings."""
    parts = []
    for module, about in MODULES.items():
        parts += [f"## {module}", prose(about)]
        for name in public_names(module):
            if not name.startswith("_") and f"{module}.{name}" not in MODULES:
                parts.append(f"::: {module}.{name}")
    about = "What an [algorithm of another package](../add-an-algorithm.md) is written with."
    parts += ["## For authors of algorithms", about]
    parts += [f"::: horovod_compress.{name}" for name in FOR_AUTHORS]
    return "\n\n".join(parts)


def command_reference(name, parser):
    """A command's page: what it does, how it is called, its arguments."""
    left_out = {"help", argparse.SUPPRESS}
    actions = [action for action in parser._actions if not {action.dest, action.help} & left_out]
    rows = [(f"`{spelling(action)}`", sentence(action.help)) for action in actions]
    called = " ".join(["hvdcompress", name, *("[options]",) * (len(actions) > 0)])
    positional = [spelling(action) for action in actions if not action.option_strings]
    parts = [f"## {name}", prose(parser.description), f"    {' '.join([called, *positional])}"]
    parts.append(table(("argument", "meaning"), rows))
    if parser.epilog:
        parts.append("```text\n" + parser.epilog.strip() + "\n```")
    return "\n\n".join(parts)


def spelling(action):
    """An argument as it is written on a command line."""
    value = action.metavar or action.dest.upper()
    if action.choices and not action.metavar:
        value = "{" + ",".join(action.choices) + "}"
    several = f"{value} …" if action.nargs in ("*", "+") else value
    if not action.option_strings:
        return f"[{several}]" if action.nargs in ("*", "?") else several
    return action.option_strings[-1] + ("" if action.nargs == 0 else f" {several}")


def commands():
    parser = cli.parser()
    choices = next(action.choices for action in parser._actions if action.dest == "command")
    return "\n\n".join(
        command_reference(name, each)
        for name, each in choices.items()
        if each.prog.split()[-1] == name
    )


# What is generated of each page, by its path in docs/.
PAGES = {
    "index.md": changes,
    **{f"algorithms/{id}.md": lambda its=its: algorithm_page(its) for id, its in REGISTRY.items()},
    "algorithms/index.md": index,
    "choose.md": recommended,
    "how-it-works.md": folders,
    "wire-format.md": layouts,
    "reference/api.md": api,
    "reference/cli.md": commands,
}


def written(path, text):
    """A page's text with its generated part brought up to date."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{PAGES[path]()}\n\n{END}{after or chr(10)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, []
    for path in PAGES:
        file = ROOT / "docs" / path
        found = file.read_text() if file.exists() else f"# {file.stem}\n\n{BEGIN}"
        text = written(path, found)
        stale += [path] if text != found else []
        if not check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
    if check and stale:
        sys.exit(f"docs/{stale[0]} is not current: run scripts/pages.py")


if __name__ == "__main__":
    main()
