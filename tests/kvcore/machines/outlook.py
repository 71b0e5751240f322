"""The blocks that a call will take, as predicted, and as a copy of the manager takes them (P13)."""

import contextlib
import copy
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import rule

import kvcore
import kvcore.pool
from tests.kvcore.machines.checks import SEQUENCES
from tests.kvcore.machines.requests import IMAGES, NAMESPACES, PROMPTS, SALTS, lowered, with_image
from tests.kvcore.machines.steps import StepRules
from tests.kvcore.views import expect

IS_COMPILED = not kvcore.pool.__file__.endswith(".py")  # such objects cannot be copied
CHUNKS = st.none() | st.integers(1, 9)


@contextlib.contextmanager
def copying(*classes):
    """Let what is one of its kind, and says so, be copied with all that it belongs to."""
    with contextlib.ExitStack() as undo:
        for one in classes:
            undo.enter_context(mock.patch.object(one, "__reduce__", object.__reduce__))
        yield


@copying(kvcore.KVCacheManager, kvcore.KVSequence, kvcore.Lease)
def copied(things):
    """A copy of a manager, with all that hangs together with it."""
    return copy.deepcopy(things)


def most_taken(kv, seq, total, chunk, external, before):
    """Let a sequence compute `total` tokens; return how many of `before` free blocks that takes.

    A load of the first `external` tokens comes first, if fewer are computed. Then all moments at
    which a step of at most `chunk` tokens can begin are tried, one after another; each token is
    told as long after it is computed as those of now. Without `chunk` there is one step.
    Returns more than `before` where there are too few blocks.
    """
    least = kv.num_free_blocks
    try:
        if external > seq.num_computed_tokens:
            lease = kv.begin_load(seq, external)
            least = kv.num_free_blocks
            kv.commit_load(lease)
            total = max(total, external)
        lag = seq.num_computed_tokens - seq.num_settled_tokens
        kv.expect(seq, max(0, total - seq.num_tokens))
        for computed in range(seq.num_computed_tokens, max(total, seq.num_computed_tokens) + 1):
            kv.reserve_to(seq, total if chunk is None else min(computed + chunk, total))
            least = min(least, kv.num_free_blocks)
            if chunk is None or computed >= total:
                break
            kv.commit(seq, 1)
            kv.resolve(seq, [7] * (computed + 1 - lag - seq.num_settled_tokens))
    except kvcore.OutOfBlocksError:
        return before + 1
    return before - least


class OutlookRules(StepRules):
    """Asked in any state; what has been said must be what is then taken, no more and no less."""

    @rule(entry=SEQUENCES, more=st.integers(0, 20), chunk=CHUNKS, external=st.integers(0, 20))
    def foresee(self, entry, more, chunk, external):
        """How many blocks a sequence still takes: told or not, loaded or not, shared or not."""
        real, naive, _ = entry
        if not real.is_open:
            return
        external = min(external, len(naive.tokens))
        total = naive.computed + more
        if self.too_long(max(total, external)):
            return
        before = self.view()
        said = self.kv.num_missing_blocks(real, more, chunk=chunk, num_external=external)
        expect("P4", self.view(), before, "state after a question")
        if IS_COMPILED:
            return
        kv, seq = copied((self.kv, real))
        free = kv.num_free_blocks
        taken = most_taken(kv, seq, total, chunk, external, free)
        expect("P13", min(said, free + 1), taken, f"blocks for {more} more tokens")

    @rule(
        prompt=PROMPTS,
        image=IMAGES,
        name=st.sampled_from(SALTS),
        chunk=CHUNKS,
        external=st.integers(0, 20),
        skips=st.booleans(),
    )
    def foresee_a_prompt(self, prompt, image, name, chunk, external, skips):
        """How many blocks a prompt takes that is not opened yet, its hits and its load included."""
        if self.too_long(len(prompt)):
            return
        tokens, items = lowered(with_image(prompt, image))
        external = min(external, len(prompt))
        about = {"namespace": NAMESPACES[name], "items": items, "skip_reading": skips}
        before = self.view()
        plan = self.kv.plan(tokens, **about, chunk=chunk, num_external=external)
        expect("P4", self.view(), before, "state after a plan")
        if IS_COMPILED:
            return
        kv = copied(self.kv)
        free = kv.num_free_blocks
        seq = kv.open(tokens, **about)
        revived = free - kv.num_free_blocks
        expect("P13", plan.num_cached_tokens, seq.num_computed_tokens, "cached tokens planned")
        expect("P13", plan.num_revived_blocks, revived, "revived blocks planned")
        taken = most_taken(kv, seq, len(tokens), chunk, external, free)
        said = plan.num_new_blocks + revived
        expect("P13", min(said, free + 1), taken, "blocks planned")
        expect("P13", plan.fits, taken <= free, "whether it fits")
