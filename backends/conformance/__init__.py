"""The kit that any backend must pass: `python -m backends.conformance NAME`.

`run` compares a backend with the float64 oracle, with itself on related inputs, and with what it
was forbidden to touch. A call that raises is a failed check, not a failed run.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from backends.conformance.attention import attention_cases, check_attention
from backends.conformance.cases import AttentionCase
from backends.conformance.movement import check_movement
from backends.conformance.relations import check_relations
from backends.conformance.report import Finding, Report
from backends.conformance.sparse import check_sparse, sparse_cases
from backends.conformance.states import check_states, state_cases
from backends.contract import Backend
from backends.sparse import SparseBackend
from backends.states import StateBackend

_TELL_EVERY_S = 2.0

__all__ = ["AttentionCase", "Finding", "Report", "run"]


def run(
    backend: Backend,
    *,
    quick: bool = False,
    shard: tuple[int, int] = (0, 1),
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the whole kit, or the quick part that suits an interpreter.

    The whole takes one to two minutes on a CPU backend; nothing of the backend's state is assumed.
    `shard` (i, n) runs every n-th case from the i-th on; the shards together are the kit.
    `tell` is called with the progress, at most every two seconds.
    """
    findings: list[Finding] = []
    index, count = shard
    cases = list(_cases(backend, quick=quick))[index::count]
    told_s = time.monotonic()
    for number, (check, case, checks) in enumerate(cases):
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            tell(f"{number} of {len(cases)} cases; now {check}: {case}")
            told_s = time.monotonic()
        _collect(findings, check, case, checks)
    return Report(backend.name, str(backend.device), tuple(findings))


def _cases(
    backend: Backend, *, quick: bool
) -> Iterator[tuple[str, str, Callable[[], Iterable[Finding]]]]:
    yield "movement", "all", partial(check_movement, backend, quick=quick)
    for case in attention_cases(backend, quick=quick):
        yield "attention", case.name, partial(check_attention, backend, case)
    for base in _relation_bases(backend, quick=quick):
        yield "relations", base.name, partial(check_relations, backend, base)
    if isinstance(backend, StateBackend):
        for each in state_cases(backend, quick=quick):
            yield "states", each.name, partial(check_states, backend, each)
    if isinstance(backend, SparseBackend) and backend.capabilities.max_index_dim:
        for one in sparse_cases(backend, quick=quick):
            yield "sparse", one.name, partial(check_sparse, backend, one)


def _collect(
    findings: list[Finding], check: str, case: str, checks: Callable[[], Iterable[Finding]]
) -> None:
    """Add the findings of a generator; what it raises becomes the last one."""
    try:
        findings.extend(checks())
    except Exception as error:  # noqa: BLE001 - a backend under test may fail in any way
        detail = f"raised {type(error).__name__}: {error}"
        findings.append(Finding(f"{check} raised", case, passed=False, detail=detail))


def _relation_bases(backend: Backend, *, quick: bool) -> Iterable[AttentionCase]:
    small = AttentionCase("small", ((2, 9), (3, 3)), head_dim=16, block_size=4)
    large = AttentionCase("large", ((2, 37), (40, 90), (7, 7)), group=3, head_dim=80)
    for dtype in backend.capabilities.dtypes:
        base = small if quick else large
        yield base.with_(dtype=dtype, name=f"{base.name}, {str(dtype)[6:]}")
