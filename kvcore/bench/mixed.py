"""W12: a step of a real engine, in which requests decode, prompts are computed, and some end.

260 requests decode, two more begin whose prompts of 675 tokens are computed in the same step, and
the two that have run for longest end. As many run in every step, as long as in the step before, and
the pool is full of idle content.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from time import thread_time_ns

from kvcore.bench.measure import Case, Round, Run, ran_ns
from kvcore.bench.peer import Cache, Options, StepCache, Subject, Tokens
from kvcore.bench.pools import BLOCK_SIZE, once_each
from kvcore.bench.prompts import in_format, random_tokens, seeded
from kvcore.bench.requests import beside, fill_cache

_PROMPT = 675
_BEGINNING = 2
_STEPS = 8


def w12(subjects: list[Subject], *, quick: bool) -> Iterator[Case]:
    """Yield W12: milliseconds for a step; by the call for a step, and request by request."""
    for windows in ((), (512,)):
        for by_request in (False, True):
            options = Options(windows=windows) if windows else Options()
            if by_request:
                options["by_request"] = True
            yield _mixed_case(subjects, 20 if quick else 260, 2 if quick else 7, options)


def _mixed_case(subjects: list[Subject], count: int, num_rounds: int, options: Options) -> Case:
    rng = seeded(12)
    # Two begin in every step, so that the oldest has decoded for as many steps as half of them.
    running = [random_tokens(rng, _PROMPT + (count - index) // 2) for index in range(count)]
    num_steps = (num_rounds + 1) * _STEPS
    prompts = [[random_tokens(rng, _PROMPT) for _ in range(_BEGINNING)] for _ in range(num_steps)]
    steps = [random_tokens(rng, count).tolist() for _ in range(num_steps + 1)]
    longest = _PROMPT + count // 2 + num_steps
    needed = (count + 2 * _BEGINNING) * (longest // BLOCK_SIZE + 2)
    needed *= 1 + len(options.get("windows", ()))
    content = [random_tokens(rng, 256) for _ in range(2 * needed // BLOCK_SIZE)]
    runs: list[Run] = []
    for subject in once_each(subjects, "W12", options):
        cache = subject.make_cache(2 * needed + 1, BLOCK_SIZE, decodes=True, options=options)
        fill_cache(cache, subject, content)
        requests = [cache.start(in_format(prompt, subject.tokens)) for prompt in running]
        cache.decode(requests, steps[0])
        alone = "by_request" in options
        runs.append(Run(subject, _Mixing(subject, cache, requests, prompts, steps[1:], alone)))
    return Case(
        workload="W12",
        name=f"{count} decode, {_BEGINNING} begin, {_BEGINNING} end{beside(options)}",
        unit="ms",
        runs=runs,
        num_rounds=num_rounds,
        num_queried_tokens=_PROMPT + 1,
        num_possible_hits=_PROMPT,
        num_wanted_hits=_PROMPT // BLOCK_SIZE * BLOCK_SIZE,
    )


class _Mixing:
    """Measures a round of steps; its hits are what another then finds of a prompt computed in it.

    Of the last step but one: the KV of the last may not be there yet.
    """

    def __init__(
        self,
        subject: Subject,
        cache: Cache,
        requests: list[object],
        prompts: list[list[array[int]]],
        steps: list[list[int]],
        alone: bool,  # noqa: FBT001  # one private caller
    ) -> None:
        self._subject = subject
        self._cache = cache
        self._requests = requests
        self._todo = iter(list(zip(prompts, steps, strict=True)))
        self._mixed = self._one_by_one
        if isinstance(cache, StepCache) and not alone:
            self._mixed = cache.mixed

    def _one_by_one(
        self, requests: Sequence[object], tokens: Sequence[int], prompts: Sequence[Tokens]
    ) -> Sequence[object]:
        self._cache.decode(requests, tokens)
        return [self._cache.start(prompt) for prompt in prompts]

    def __call__(self) -> Round:
        todo = [next(self._todo) for _ in range(_STEPS)]
        form = self._subject.tokens
        steps = [([in_format(prompt, form) for prompt in new], tokens) for new, tokens in todo]
        mixed, finish, running = self._mixed, self._cache.finish, self._requests
        begin = thread_time_ns()
        for new, tokens in steps:
            begun = mixed(running, tokens, new)
            for request in running[:_BEGINNING]:
                finish(request)
            del running[:_BEGINNING]
            running.extend(begun)
        cost = ran_ns(begin) / _STEPS / 1e6
        hits_before = self._cache.num_hit_tokens()
        probe = in_format(todo[-2][0][0] + array("I", [0]), form)
        self._cache.finish(self._cache.start(probe))
        return Round(cost, self._cache.num_hit_tokens() - hits_before)
