"""Jobs of ranks that several tests ask for, and two hosts that one machine plays."""

import contextlib

import elastic_jobs
import pytest
import two_hosts as program
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


@pytest.fixture(scope="session")
def two_hosts():
    """two_hosts(rate): two hosts for as long as the context is open, where a machine can
    play them."""

    @contextlib.contextmanager
    def joined(rate="none"):
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(program.Hosts(rate))
            except RuntimeError as error:
                pytest.skip(str(error))
            yield hosts

    joined.addresses = program.HOSTS
    return joined


@pytest.fixture(
    scope="session",
    params=[
        "on one machine",
        pytest.param("on two hosts", marks=pytest.mark.release),
    ],
)
def elastic_job(request, tmp_path_factory, two_hosts):
    """The folder of an elastic job that has ended. On two hosts the one whose rank has died comes
    back under its address, which is a new host to Horovod."""
    folder = tmp_path_factory.mktemp("elastic")
    if request.param == "on one machine":
        elastic_jobs.run(folder, "elastic_job.py")
    else:
        with two_hosts("1gbit") as hosts:
            names = ("a", "b", two_hosts.addresses["b"])
            elastic_jobs.run(folder, "elastic_job.py", names=names, hosts=hosts)
    return folder
