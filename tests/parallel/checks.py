"""What cases are made of."""

import contextlib
import io
import pathlib
import re
from unittest import mock

ROOT = pathlib.Path(__file__).parents[2]


def registry():
    """(cases by name, a decorator that adds one: the numbers of ranks it is meant for)."""
    cases = {}

    def case(*sizes):
        def register(function):
            cases[function.__name__] = (sizes, function)
            return function

        return register

    return cases, case


def joined(*topics):
    """The cases of modules, in their order. Their names tell them apart, whatever module they are
    of."""
    cases = {}
    for topic in topics:
        twice = cases.keys() & topic.CASES.keys()
        assert not twice, f"cases of {topic.__name__} have names that are taken: {sorted(twice)}"
        cases.update(topic.CASES)
    return cases


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"the error does not say {missing}: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def assert_equal(mine, its):
    """Bit for bit, of tensors in dictionaries and lists."""
    if hasattr(its, "dtype"):
        assert mine.dtype == its.dtype and mine.numpy().tobytes() == its.numpy().tobytes()
    elif isinstance(its, dict):
        assert mine.keys() == its.keys()
        for key in its:
            assert_equal(mine[key], its[key])
    else:
        assert len(mine) == len(its)
        for pair in zip(mine, its):
            assert_equal(*pair)


def scripts_of_pages(call):
    """{page: script} of those Python blocks in pages that are whole scripts, because they make a
    call that begins a job."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    found = {}
    for page in pages:
        for block in re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text()):
            if call in block:
                assert page not in found, f"{page} has two scripts"
                found[page] = block
    assert found
    return found


def said_by(script, page, module, *begins_and_ends):
    """What this rank prints as it runs a script. The job has begun already, and goes on, so that
    the module's functions of these names do nothing."""
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        called = [stack.enter_context(mock.patch.object(module, name)) for name in begins_and_ends]
        exec(compile(script, str(page), "exec"), {"__name__": "__main__"})
    for each in called:
        each.assert_called_once()
    return said.getvalue()
