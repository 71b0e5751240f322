"""The names of the backends, and the choice of one that runs here.

Decides names and availability. Invariants: nothing is imported before a caller names it; a
backend that a caller names is the one that comes back, or an error that says why not and what to
choose instead; a package's entry point never takes a built-in name. Knows nothing of kernels.

A plug-in is an entry point of the group `kvcore.backends` whose object, called without arguments,
returns a `Backend` or raises `BackendUnavailableError`.
"""

import difflib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import torch

from backends.contract import Backend
from backends.errors import BackendUnavailableError, UnknownBackendError

ENTRY_POINT_GROUP = "kvcore.backends"

_BUILT_IN = (
    EntryPoint("numba", "backends.numba_cpu:load", ENTRY_POINT_GROUP),
    EntryPoint("triton", "backends.triton_gpu:load", ENTRY_POINT_GROUP),
)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The availability of a backend here; `reason` is empty where it can run."""

    name: str
    available: bool
    reason: str


def get_backend(name: str = "auto") -> Backend:
    """Load a backend by name; `auto` is triton where CUDA is, numba elsewhere.

    Imports the backend's toolchain on its first use (about a second), nothing otherwise.

    Raises:
        UnknownBackendError: no such name; lists the known ones.
        BackendUnavailableError: it cannot run here; carries the reason and the alternative.
    """
    if name == "auto":
        name = "triton" if torch.cuda.is_available() else "numba"
    return _load(name, _find(name))


def list_backends() -> tuple[BackendStatus, ...]:
    """Every known backend and whether it can run here. Loads each one: all their imports."""
    found = []
    for name in backend_names():
        try:
            _load(name, _find(name))
        except BackendUnavailableError as error:
            found.append(BackendStatus(name, available=False, reason=error.reason))
        else:
            found.append(BackendStatus(name, available=True, reason=""))
    return tuple(found)


def backend_names() -> tuple[str, ...]:
    """The built-in names, then the registered ones in alphabetical order; loads nothing."""
    built_in = tuple(point.name for point in _BUILT_IN)
    registered = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return built_in + tuple(sorted(registered - set(built_in)))


def _find(name: str) -> EntryPoint:
    for point in _BUILT_IN:
        if point.name == name:
            return point
    points = {
        point.value: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name
    }
    if len(points) > 1:
        reason = "several packages register this name: " + ", ".join(sorted(points))
        raise BackendUnavailableError(name, reason, "uninstall all but one of them")
    if points:
        return next(iter(points.values()))
    known = backend_names()
    close = difflib.get_close_matches(name, (*known, "auto"), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UnknownBackendError(
        f"unknown backend {name!r}; known: auto, {', '.join(known)}{hint}"
    ) from None


def _load(name: str, point: EntryPoint) -> Backend:
    try:
        backend = point.load()()
    except BackendUnavailableError:
        raise
    except Exception as error:  # a plug-in may fail in any way; its reason is passed on
        reason = f"loading {point.value} failed: {type(error).__name__}: {error}"
        raise BackendUnavailableError(name, reason, _alternative(name)) from error
    if not isinstance(backend, Backend):
        reason = f"{point.value} returned {type(backend).__name__}, which is no Backend"
        raise BackendUnavailableError(name, reason, _alternative(name))
    return backend


def _alternative(name: str) -> str:
    others = (known for known in ("auto", *backend_names()) if known != name)
    return "choose another of: " + ", ".join(others)
