"""What the documentation has from the code is current, its examples run, its links lead somewhere,
and it recommends one compression a situation."""

import doctest
import importlib.util
import pathlib

import pytest

from horovod_compress import compressors
from horovod_compress.compressors import policy
from horovod_compress.engine import simulate as simulation

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


@pytest.mark.parametrize("path", pages.PAGES)
def test_what_is_generated_is_current(path):
    text = (ROOT / "docs" / path).read_text()
    assert text == pages.written(path, text), "run scripts/pages.py"


@pytest.mark.parametrize("module", [compressors, policy, simulation], ids=lambda it: it.__name__)
def test_examples_in_docstrings_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 2 and not failed


def test_examples_in_pages_run():
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        # What ends a block of code is no output.
        text = "\n".join("" if "```" in line else line for line in page.read_text().split("\n"))
        runner.run(parser.get_doctest(text, {}, page.name, str(page), 0))
    assert not runner.failures
