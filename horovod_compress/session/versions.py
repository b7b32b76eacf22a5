"""The versions of other packages that this one was tried with, where it relies on how they are
written inside."""

import functools
import warnings
from typing import Dict, Tuple

# The beginnings of versions that were tried, and what may break with others.
TRIED: Dict[str, Tuple[Tuple[str, ...], str]] = {
    "horovod": (
        ("0.28",),
        "gradients may be refused, or taken for those of another optimizer or process set",
    ),
    "torch": (
        ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "steps with a closure or a GradScaler, compiled models and moments of samples may be "
        "refused or mistaken",
    ),
    "tensorflow": (
        ("2.15", "2.21"),
        "functions may be traced again or too seldom, and optimizers of Keras and loss scales may "
        "not be found",
    ),
}


@functools.lru_cache(maxsize=None)
def check_version(package: str, found: str) -> None:
    """Warns once of a version of a package that was not tried. It is used all the same.

    Args:
        package: one of `TRIED`.
        found: the version that is installed, as the package says it.
    """
    versions, otherwise = TRIED[package]
    if not any(f"{found}.".startswith(f"{version}.") for version in versions):
        warnings.warn(
            f"horovod_compress relies on how {package} is written inside, and was tried with "
            f"{package} {' and '.join(versions)}; this is {found}. Most likely all is well; "
            f"else {otherwise}. If so, install a version that was tried",
            RuntimeWarning,
            stacklevel=2,
        )
