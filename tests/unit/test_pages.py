"""What the documentation has from the code is current, its examples run, its links lead somewhere,
and it recommends one compression a situation."""

import contextlib
import doctest
import io
import pathlib
import re

import pages
import pytest

import horovod_compress as hc
from horovod_compress.compressors import policy, registry
from horovod_compress.compressors.advice import ADVICE
from horovod_compress.engine import simulate as simulation
from horovod_compress.tools.cli import main

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("path", pages.PAGES)
def test_what_is_generated_is_current(path):
    text = (ROOT / "docs" / path).read_text()
    assert text == pages.written(path, text), "run scripts/pages.py"


@pytest.mark.parametrize("module", [policy, registry, simulation], ids=lambda it: it.__name__)
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


def test_prose_has_at_most_100_columns():
    """Tables and blocks of code may have more."""
    wide = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"(?ms)^```.*?^```$", lambda it: "\n" * it[0].count("\n"), page.read_text())
        wide += [
            f"{page.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.split("\n"), 1)
            if len(line) > 100 and not line.startswith(("|", "    "))
        ]
    assert not wide


def anchors_of(page):
    """The anchors that GitHub makes of a page's headings, and those in HTML."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="([^"]+)"', text))


def test_links_of_pages_outside_of_the_site_lead_somewhere():
    """Those within docs/ are checked where the site is built, by scripts/docs."""
    for page in ROOT.glob("*.md"):
        links = set(re.findall(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)", page.read_text()))
        for link, anchor in links:
            if "://" not in link:
                assert (ROOT / link).exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors_of(ROOT / link), f"{link}#{anchor}"


# What is read by those who look for a compression. Results, references and the pages of algorithms
# have specs of all kinds.
ADVISING = [
    ROOT / "README.md",
    *(page for page in (ROOT / "docs").glob("*.md") if page.name != "decentralized.md"),
    *(ROOT / "docs" / "start").glob("*.md"),
    *(ROOT / "docs" / "guides").glob("*.md"),
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "horovod_compress").rglob("*.py"),
    ROOT / "CHANGELOG.md",
]
# Specs that are no recommendation, with what they are there for.
SHOWN = {
    "adacomp:min_numel=256": "a measured run",
    "dgc:ratio=0.05": "examples/spark_estimator.py trains for a few steps",
    "dgc:ratio=2": "an error",
    "powersgd:rank=4": "a candidate of auto",
    "qsgd:bits=4,norm=max": "messages of decentralized training, which need one without a residual",
    "topk:ratio=0.001": "a switch of updates",
    "topk:ratio=0.01": "the default of UpdateOptimizer, and what any compressor does",
    "topk:ratio=1": "the dense limit",
}
SPEC = re.compile(rf"(?<![\w./])(?:{'|'.join(hc.available())}):\w+=[^\s\"'`)\\]+")


def specs_in(text):
    """The specs in a text, without options whose values are left to the reader."""
    for spec in SPEC.findall(text):
        parts = [part for part in spec.rstrip(".,;:").split(",") if "…" not in part]
        yield from [",".join(parts)] if parts else []


def is_recommended(spec):
    """Whether a spec is a recommended one, perhaps with more options."""
    id, _, options = spec.partition(":")
    recommended = (each.spec.partition(":") for each in ADVICE)
    return any(
        id == its and set(known.split(",")) <= set(options.split(","))
        for its, _, known in recommended
    )


def helps():
    """What hvdcompress and its commands print for --help."""
    for command in ([], ["info"], ["bench"], ["plan"], ["check"], ["report"]):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*command, "--help"])
        yield " ".join(["--help", *command]), said.getvalue()


def advising():
    """All texts that advise, by name."""
    return dict(helps(), **{str(file.relative_to(ROOT)): file.read_text() for file in ADVISING})


def test_what_is_recommended_is_the_same_everywhere():
    found = {(name, spec) for name, text in advising().items() for spec in specs_in(text)}
    assert len(found) > 20
    others = {(name, spec) for name, spec in found if not is_recommended(spec)}
    assert not {(name, spec) for name, spec in others if spec not in SHOWN}


# A call that gives a training its compression, with the spec or its options.
MADE = re.compile(
    r"Compression\.(dgc)\(([^)]*)\)|(?:ddp\.compress|comm_hook|from_spec)\([^\")]*\"(dgc):([^\"]*)\""
)
# Local steps of an exchange, as they are told with the numbers of ranks.
ON_TWO = re.compile(r"every=(\d+)\b[^\n]*\bon 2 ranks")
ON_MORE = re.compile(r"\bon more (?:ranks|replicas) every=(\d+)|\bevery=(\d+)` on more")


def test_trainings_warm_up_where_that_is_recommended():
    """Calls in code and in its comments too, where they give the ratio that is recommended."""
    asked = {option for each in ADVICE for option in re.findall(r"`(\w+)=`", each.besides)}
    assert asked == {"warmup_steps"}
    made = [
        (name, "".join(filter(None, its.groups())))
        for name, text in advising().items()
        for its in MADE.finditer(text)
    ]
    recommended = [its for its in made if re.search(r"ratio=0\.001\b", its[1])]
    assert len(recommended) > 8
    assert not [its for its in recommended if "warmup_steps=" not in its[1]]


def test_local_steps_are_the_same_everywhere():
    """In comments of code too."""
    texts = advising()
    on_two = {(name, int(its)) for name, text in texts.items() for its in ON_TWO.findall(text)}
    on_more = {
        (name, int("".join(its))) for name, text in texts.items() for its in ON_MORE.findall(text)
    }
    two, more = (each.every for each in ADVICE if each.every)
    assert len(on_two) > 3 and len(on_more) > 3
    assert {its for _, its in on_two} == {two}, on_two
    assert {its for _, its in on_more} == {more}, on_more


def test_the_citation_has_the_version():
    assert f"version: {hc.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_recommendation_can_be_made_and_is_on_the_page():
    page = (ROOT / "docs" / "choose.md").read_text()
    for each in ADVICE:
        assert hc.get_compressor(each.spec) and each.spec in page
