"""W7, W8, W9 and W11: what W3 to W5 are where an engine has more than one group of full attention.

W7 has one and two sliding windows beside the full group, as hybrid models have. W8 records what is
stored and removed, and takes it after each request. W9 decodes, and plays the trace of W5, with the
calls of each request where there are calls for whole steps. W11 has blocks of 32 and 64 tokens, and
weighs blocks of 16 and 64.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.bench.measure import Case, Run
from kvcore.bench.peer import Options, Subject, Workload
from kvcore.bench.pools import BLOCK_SIZE, once_each, weighing
from kvcore.bench.requests import able_subjects, chat_case, decode_case, life_case

_WINDOWS = ((1024,), (512, 1024))


def w7(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W7: microseconds for a request's life, milliseconds for a decode step."""
    for windows in _WINDOWS:
        options = Options(windows=windows)
        able = able_subjects(subjects, "W7", options)
        for length in (256,) if quick else (256, 1024, 4096, 32_768):
            for share in (0, 100):
                yield life_case(
                    able, length, share, length, quick=quick, workload="W7", options=options
                )
        yield _decoding(subjects, "W7", options, quick=quick)
        yield _decoding(subjects, "W7", Options(windows=windows, by_step=True), quick=quick)


def w8(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W8: microseconds for a request's life, its events taken."""
    options = Options(events=True)
    able = able_subjects(subjects, "W8", options)
    for length in (256,) if quick else (256, 1024, 4096, 32_768):
        yield life_case(able, length, 0, length, quick=quick, workload="W8", options=options)


def w9(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W9: milliseconds for a decode step, seconds for the chat trace; request by request."""
    yield _decoding(subjects, "W9", Options(by_request=True), quick=quick)
    yield _decoding(subjects, "W9", Options(windows=(1024,), by_request=True), quick=quick)
    for size in (BLOCK_SIZE, 256):
        yield chat_case(subjects, "W9", Options(by_request=True), quick=quick, block_size=size)


def w11(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W11: microseconds for a request's life; bytes a block."""
    able = able_subjects(subjects, "W11")
    for size in (32, 64):
        for share in (0, 100):
            length = 256 if quick else 4096
            yield life_case(
                able, length, share, length, quick=quick, workload="W11", block_size=size
            )
    num_blocks = 8_192 if quick else 100_000
    for size in (16, 64):
        runs = [
            Run(subject, weighing(subject, num_blocks, fill=True, block_size=size))
            for subject in once_each(subjects, "W11")
        ]
        yield Case("W11", f"full, blocks of {size}", "bytes/block", runs, 1, 0)


def _decoding(
    subjects: list[Subject], workload: Workload, options: Options, *, quick: bool
) -> Case:
    return decode_case(
        once_each(subjects, workload, options),
        32 if quick else 256,
        2 if quick else 7,
        workload=workload,
        options=options,
    )
