"""Versions of other packages that were not tried are warned of, and never refused."""

import warnings

import pytest

from horovod_compress.session.versions import TRIED, check_version


@pytest.fixture(autouse=True)
def nothing_was_said():
    check_version.cache_clear()
    yield
    check_version.cache_clear()


@pytest.mark.parametrize(
    "package, found",
    [("horovod", "0.29.0"), ("torch", "3.0.1+cu130"), ("tensorflow", "2.150"), ("torch", "2.1")],
)
def test_another_version_is_warned_of_once(package, found):
    versions, otherwise = TRIED[package]
    with pytest.warns(RuntimeWarning) as seen:
        check_version(package, found)
        check_version(package, found)
    (warning,) = seen
    for said in (package, found, versions[0], otherwise):
        assert said in str(warning.message)


@pytest.mark.parametrize(
    "package, found",
    [("horovod", "0.28.1"), ("torch", "2.13.0+cpu"), ("tensorflow", "2.21.0"), ("torch", "2.11")],
)
def test_a_version_that_was_tried_is_used_in_silence(package, found):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(package, found)
