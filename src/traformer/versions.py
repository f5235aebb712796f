"""The versions of torch and transformers that this package is tested with, and a sentence for older ones."""

from __future__ import annotations

import re
from importlib import metadata

from traformer.errors import TraformerError

# As in pyproject.toml, where they keep pip from choosing another; here for environments that pip did not make.
OLDEST = {"torch": (2, 13), "transformers": (5, 20)}


class VersionError(TraformerError, ImportError):
    """A package is too old to work with."""


def require(package: str) -> None:
    """Raise VersionError if the installed version is older than the oldest one tested. The package is not imported."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:  # importing it says so
        return
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST[package]:
        oldest = ".".join(str(part) for part in OLDEST[package])
        raise VersionError(
            f"{package} {found} is too old: traformer is tested with {oldest} and later; install it with: "
            f"pip install '{package}>={oldest}'"
        )
