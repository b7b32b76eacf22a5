"""What cases are made of."""

import contextlib


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
