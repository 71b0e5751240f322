"""Cuts a plan that fails down to a short one that fails in the same way.

Greedy: requests go in halves, then one by one; then faults; then every field towards its plainest
value. A smaller plan is kept if its run breaks a rule of the same kind. What goes first is drawn
anew for each plan, so a few draws are tried.
"""

import dataclasses

from tests.simulation.world import Run

_DRAWS = 3
_PLAIN_FEATURES = {
    "speaks_http": False, "num_ranks": 1, "drafts": False, "most_deferred": 0,
    "num_host_blocks": 0, "kinds": ("full",), "watermark": 0.0, "max_waiting": 1000,
    "max_num_seqs": 64, "max_num_batched_tokens": 256, "tiers": (),
}  # fmt: skip
_PLAIN_ASK = {
    "num_samples": 1, "priority": 0, "client": None, "salt": "", "stop": (), "ignores_eos": True,
    "retains": False, "streams": True, "leaves_s": None, "pause_s": 0.0, "at_s": 0.0,
}  # fmt: skip


def kind_of(violation):
    """A violation without its numbers."""
    return "".join(letter for letter in violation if letter.isalpha() or letter == " ")[:60]


class Shrinker:
    """Cuts one plan down.

    Args:
        plan: fails.
        bug: see `Run`.
        most_runs: how many runs it may take.
    """

    def __init__(self, plan, bug=None, most_runs=400):
        self.plan, self.num_runs = plan, 0
        self._bug, self._most_runs = bug, most_runs
        self.outcome = Run(plan, bug, checks_all=True)()
        self._kind = kind_of(self.outcome.violation)

    def __call__(self):
        """The smallest plan that was found, and what comes of it."""
        before = None
        while before != self.plan and self.num_runs < self._most_runs:
            before = self.plan
            self._drop("asks")
            self._drop("faults")
            self._simplify()
        return self.plan, self.outcome

    def _try(self, plan):
        for number in range(_DRAWS):
            if self.num_runs >= self._most_runs:
                return False
            self.num_runs += 1
            drawn = plan.replace(seed=plan.seed + number)
            outcome = Run(drawn, self._bug, checks_all=True)()
            if outcome.violation is not None and kind_of(outcome.violation) == self._kind:
                self.plan, self.outcome = drawn, outcome
                return True
        return False

    def _drop(self, name):
        size = len(getattr(self.plan, name))
        while size >= 1:
            start = 0
            while start < len(getattr(self.plan, name)):
                whole = getattr(self.plan, name)
                fewer = whole[:start] + whole[start + size :]
                if not self._try(self.plan.replace(**{name: fewer})):
                    start += size
            size //= 2

    def _simplify(self):
        for name, value in _PLAIN_FEATURES.items():
            features = self.plan.features
            if getattr(features, name) != value:
                plain = dataclasses.replace(features, **{name: value})
                self._try(self.plan.replace(features=plain))
        for place in range(len(self.plan.asks)):
            for name, value in _PLAIN_ASK.items():
                if getattr(self.plan.asks[place], name) != value:
                    self._change(place, **{name: value})
            self._halve(place)

    def _halve(self, place):
        """Shorten a prompt and its answer as far as halving goes."""
        is_shorter = True
        while is_shorter:
            ask = self.plan.asks[place]
            is_shorter = (
                len(ask.prompt) > 1
                and self._change(place, prompt=ask.prompt[: (len(ask.prompt) + 1) // 2])
            ) or (ask.max_tokens > 1 and self._change(place, max_tokens=(ask.max_tokens + 1) // 2))

    def _change(self, place, **values):
        asks = list(self.plan.asks)
        asks[place] = dataclasses.replace(asks[place], **values)
        return self._try(self.plan.replace(asks=tuple(asks)))
