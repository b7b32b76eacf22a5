"""The number of examples that a property is tried with."""

from hypothesis import settings


def examples(number):
    """`number` examples with --all or --slow, else at most those of tests/conftest.py's profile."""
    return settings(max_examples=min(number, settings.default.max_examples))
