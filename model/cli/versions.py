"""Packages of the environment whose versions kvcore was not tried with.

Decides: that the metadata of what is installed says which versions are supported: of the engine and
its kernels, or of kvcore in an editable install. A checkout that is not installed has none.

Does not know: what failed.
"""

from collections.abc import Iterator
from importlib import import_module

_ENGINE: dict[str, tuple[str, ...]] = {"kvcore-engine": ("", "serve"), "kvcore-kernels": ("",)}
_EDITABLE: dict[str, tuple[str, ...]] = {
    "kvcore": ("model", "cpu")  # `run` and what includes it have exact versions
}


def unsupported() -> list[str]:
    """Return a text for each package in an unsupported version: its name, wanted and got.

    O(requirements).
    """
    metadata = import_module("importlib.metadata")  # slow to load, and used after a failure only
    requirement = import_module("packaging.requirements").Requirement
    found = {}
    for line, extras in [*_requirements(_ENGINE)] or [*_requirements(_EDITABLE)]:
        wanted = requirement(line)
        marker = wanted.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            got = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        if not wanted.specifier.contains(got, prereleases=True):
            found[wanted.name] = f"{wanted.name}: wanted {wanted.specifier}, got {got}"
    return [*found.values()]


def _requirements(
    distributions: dict[str, tuple[str, ...]],
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each requirement of the distributions that are installed, and which extras count."""
    metadata = import_module("importlib.metadata")
    for name, extras in distributions.items():
        try:
            yield from ((line, extras) for line in metadata.requires(name) or ())
        except metadata.PackageNotFoundError:
            continue
