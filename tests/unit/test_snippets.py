"""The documentation's code: it parses, and every name, option, spec and command in it exists."""

import argparse
import ast
import pathlib
import re
import shlex
import textwrap

import pytest
import stubs

from horovod_compress import get_compressor
from horovod_compress.compressors import ids
from horovod_compress.tools import bench, check, info, plan, report

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
}
pages = pytest.mark.parametrize("page", PAGES)
CODE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Of the example's package, which is not installed here, and any algorithm's.
ELSEWHERE = {"cyclic", "ID"}
SPEC = re.compile(rf"(?<![\w/.-])(?:{'|'.join(ids())}):[\w.=,*+/…-]+")
COMMAND = re.compile(r"\b(hvdcompress (?:info|bench|plan|check|report)\b[^#\n]*)")


def blocks(page, language):
    """The code blocks of a page in a language, without their indentation."""
    return [textwrap.dedent(text) for _, its, text in CODE.findall(PAGES[page]) if its == language]


def source(*path):
    """A module's syntax: importing a framework takes seconds."""
    return ast.parse((ROOT / "horovod_compress").joinpath(*path).read_text())


def offered(*modules):
    """The names in `__all__` of modules."""
    assigned = [
        node
        for each in modules
        for node in source(each, "__init__.py").body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    assert len(assigned) == len(modules)
    return {name for node in assigned for name in ast.literal_eval(node.value)}


def makers(framework):
    """The arguments of the methods of a framework's `Compression`, by name."""
    return {
        node.name: {each.arg for each in node.args.args + node.args.kwonlyargs}
        for node in ast.walk(ast.parse(stubs.stub(framework)))
        if isinstance(node, ast.FunctionDef)
    }


HVDC, DDP = offered("torch", "tensorflow"), offered("ddp")
MAKERS = [makers("torch"), makers("tensorflow")]


@pages
def test_python_parses(page):
    for block in blocks(page, "python"):
        ast.parse(block, filename=page)


@pages
def test_names_exist(page):
    assert set(re.findall(r"\bhvdc\.(\w+)", PAGES[page])) <= HVDC
    assert set(re.findall(r"\bddp\.(?!md\b)([a-zA-Z]\w+)", PAGES[page])) <= DDP


@pages
def test_makers_and_their_arguments_exist(page):
    for name, arguments in re.findall(r"\bCompression\.(\w+)(?:\(([^()]*)\))?", PAGES[page]):
        if name in ELSEWHERE:
            continue
        takes = [makers[name] for makers in MAKERS if name in makers]
        assert takes, (page, name)
        given = set(re.findall(r"(?:^|,)\s*(\w+)=", re.sub(r'"[^"]*"', "", arguments)))
        assert any(given <= its for its in takes), (page, name, given)


@pages
def test_specs_are_valid(page):
    for spec in SPEC.findall(PAGES[page]):
        if "…" not in spec and "=" in spec:
            get_compressor(spec.rstrip(".,"))


@pages
def test_commands_parse(page):
    parser = argparse.ArgumentParser(prog="hvdcompress")
    commands = parser.add_subparsers()
    for command in (bench, check, info, plan, report):
        command.add(commands)
    for block in blocks(page, ""):
        for command in COMMAND.findall(block.replace("\\\n", " ")):
            parser.parse_args(shlex.split(command)[1:])


def test_what_errors_are_quoted_with_is_said():
    """Text in quotation marks in the table of docs/errors.md, but for what stands for names."""
    code = "".join(path.read_text() for path in (ROOT / "horovod_compress").rglob("*.py"))
    # What is one string over several lines.
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    table = PAGES["docs/errors.md"].partition("## Faults")[0]
    quoted = [part.strip() for each in re.findall(r'"([^"]+)"', table) for part in each.split("…")]
    assert len(quoted) > 8
    assert not [part for part in quoted if part not in code]
