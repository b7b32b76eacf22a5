"""Jobs of ranks that several tests ask for: one job runs all cases of a test that were chosen."""

import pytest
from jobs import launch


@pytest.fixture(scope="session")
def _outcomes():
    return {}


def _cases_beside(request):
    """The `case` parameters of all chosen tests that differ from this one in nothing else."""

    def rest(item):
        return {name: value for name, value in item.callspec.params.items() if name != "case"}

    alike = [
        item
        for item in request.session.items
        if getattr(item, "function", None) is request.function
    ]
    return tuple(item.callspec.params["case"] for item in alike if rest(item) == rest(request.node))


@pytest.fixture
def job(request, _outcomes, tmp_path_factory):
    """job(launcher, size, …), with options of jobs.launch: what became of the cases of this test.

    The job is launched when its first case is asked for. It has the cases that were chosen, so that
    fewer chosen tests take less time.
    """

    def run(launcher, size, **options):
        names = _cases_beside(request)
        key = request.function, launcher, size
        if key not in _outcomes:
            folder = tmp_path_factory.mktemp(request.function.__name__)
            _outcomes[key] = launch(folder, launcher, size, names, **options)
        return _outcomes[key]

    return run
