"""Operations on recurrent states: the kit catches planted bugs; the CPU backend conforms."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

import backends
from backends import (
    Capabilities,
    DecayGate,
    InvalidArgumentError,
    LinearAttentionTerms,
    ShortConvTerms,
    StateBatch,
    UnsupportedError,
)
from backends.conformance.cases import bits
from backends.conformance.states import LAYERS, MODES, StateCase, build, check_states
from backends.conformance.states import state_cases as kit_cases
from backends.state_oracle import rows_of
from backends.states import NORM_EPSILON
from tests.backends.honest import HonestBackend
from tests.backends.strategies import state_cases

NUMBA = backends.get_backend("numba")
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class HonestStates(HonestBackend):
    """Operations on states in plain torch, to be broken in one place at a time."""

    capabilities = Capabilities(
        dtypes=(torch.float32,),
        max_head_dim=1,
        max_group_size=1,
        state_dtypes=(torch.float32, torch.bfloat16),
        max_state_dim=64,
    )

    def short_conv_step(self, x, state, batch, terms, *, out=None):
        out = torch.empty_like(x) if out is None else out

        def advance(t, now):
            inputs = torch.cat([now, x[t : t + 1]])
            y = (inputs * self.taps(terms.weight)).sum(0)
            y = y if terms.bias is None else y + terms.bias
            out[t] = y * y.sigmoid() if terms.silu else y
            return inputs[1:]

        self.walk(state, batch, advance)
        return out

    def linear_attention_step(
        self, query, key, value, decay, beta, state, batch, terms, *, out=None
    ):
        out = torch.empty_like(value) if out is None else out
        heads, gate = self.key_heads(state.shape[1], query.shape[1]), terms.gate

        def advance(t, now):
            q, k = (self.normed(x[t, heads], terms.l2norm)[..., None] for x in (query, key))
            g, new, rate = decay[t], value[t], 1.0 if beta is None else beta[t, :, None]
            if gate is not None:
                dt = self.softplus(g if gate.bias is None else g + gate.bias).clamp(*gate.limits)
                g, rate = dt * gate.a, dt[:, None] if beta is None else rate
            now, late = self.decayed(now, g.exp().reshape(len(g), -1, 1))
            if terms.delta_rule:
                new = new - (now * k).sum(1)
            now = (now + k * (rate * new)[:, None]) * late
            out[t] = terms.scale * (now * q).sum(1)
            if terms.skip is not None:
                out[t] += terms.skip[:, None] * value[t]
            return now

        self.walk(state, batch, advance)
        return out

    def walk(self, state, batch, advance) -> None:
        for s, rows in enumerate(rows_of(batch)):
            read = int(batch.read_slots[s])
            now = self.before(state, read)
            slot, kept = int(batch.write_slots[s]), now
            for number, t in enumerate(rows):
                now = self.rounded(advance(t, now), state.dtype)
                if number < self.stored(batch, s, len(rows)):
                    kept = now
            if self.writes(slot) and rows:
                self.slot(state, self.target(slot, read)).copy_(kept)

    def stored(self, batch, s: int, count: int) -> int:
        return count if batch.num_stored is None else int(batch.num_stored[s])

    def before(self, state: Tensor, slot: int) -> Tensor:
        return self.slot(state, slot).float() if slot >= 0 else torch.zeros(state.shape[1:])

    def slot(self, state: Tensor, slot: int) -> Tensor:
        return state[slot]

    def writes(self, slot: int) -> bool:
        return slot >= 0

    def target(self, slot: int, read: int) -> int:
        return slot

    def rounded(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        return state.to(dtype).float()

    def decayed(self, state: Tensor, kept: Tensor) -> tuple[Tensor, Tensor | float]:
        """The state, and what it is multiplied by after the token."""
        return state * kept, 1.0

    def key_heads(self, num_heads: int, num_key_heads: int) -> Tensor:
        return torch.arange(num_heads) // (num_heads // num_key_heads)

    def taps(self, weight: Tensor) -> Tensor:
        return weight.T

    def normed(self, x: Tensor, l2norm: bool) -> Tensor:
        return x * ((x * x).sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() if l2norm else x

    def softplus(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x, threshold=50)


class StoresDraftTokens(HonestStates):
    def stored(self, batch, s, count):
        return count


class WritesTheSlotItReads(HonestStates):
    def target(self, slot, read):
        return read if read >= 0 else slot


class IgnoresThePages(HonestStates):
    def slot(self, state, slot):
        first = state.storage_offset() + slot * state[0].numel()
        return state.as_strided(state.shape[1:], state[0].stride(), first)


class ReadsANeighboursSlot(HonestStates):
    def before(self, state, slot):
        return super().before(state, slot + 1 if 0 <= slot < len(state) - 1 else slot)


class ReadsASlotWhereThereIsNone(HonestStates):
    def before(self, state, slot):
        return self.slot(state, slot).float()


class KeepsAStateThatIsToBeForgotten(HonestStates):
    def writes(self, slot):
        return True


class CountsSlotZeroAsNone(HonestStates):
    def writes(self, slot):
        return slot > 0


class DecaysAfterTheToken(HonestStates):
    def decayed(self, state, kept):
        return state, kept


class RoundsOnlyWhatIsKept(HonestStates):
    def rounded(self, state, dtype):
        return state


class RoundsEachStateToHalf(HonestStates):
    def rounded(self, state, dtype):
        return super().rounded(state.half(), dtype)


class InterleavesTheKeyHeads(HonestStates):
    def key_heads(self, num_heads, num_key_heads):
        return torch.arange(num_heads) % num_key_heads


class TurnsTheTapsAround(HonestStates):
    def taps(self, weight):
        return weight.T.flip(0)


class NormsAHundredThousandthTooLong(HonestStates):
    def normed(self, x, l2norm):
        return super().normed(x, l2norm) * (1 + 1e-5)


class CutsTheSoftplus(HonestStates):
    def softplus(self, x):
        return torch.nn.functional.softplus(x, threshold=5)


class ChangesTheBatch(HonestStates):
    def walk(self, state, batch, advance):
        super().walk(state, batch, advance)
        batch.write_slots.fill_(-1)


SABOTAGE = {
    StoresDraftTokens: "states",
    WritesTheSlotItReads: "untouched",
    IgnoresThePages: "poison",
    ReadsANeighboursSlot: "poison",
    ReadsASlotWhereThereIsNone: "poison",
    KeepsAStateThatIsToBeForgotten: "untouched",
    CountsSlotZeroAsNone: "permutation",
    DecaysAfterTheToken: "accuracy",
    RoundsOnlyWhatIsKept: "together or apart",
    RoundsEachStateToHalf: "states",
    InterleavesTheKeyHeads: "accuracy",
    TurnsTheTapsAround: "accuracy",
    NormsAHundredThousandthTooLong: "accuracy",
    CutsTheSoftplus: "accuracy",
    ChangesTheBatch: "untouched",
}


def failed_checks(backend):
    cases = kit_cases(backend, quick=True)
    return {f.check for case in cases for f in check_states(backend, case) if not f.passed}


def test_an_honest_backend_passes():
    assert failed_checks(HonestStates()) == set()


@pytest.mark.parametrize("bug", SABOTAGE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_by_name(bug):
    assert SABOTAGE[bug] in failed_checks(bug())


@given(state_cases(DTYPES))
def test_random_batches_match_the_oracle(case):
    for finding in check_states(NUMBA, case):
        assert finding.passed, finding


@pytest.mark.parametrize("layer", LAYERS)
def test_every_number_of_threads_gives_the_same_bits(layer, monkeypatch):
    dims = (3, 2000) if layer == "conv" else (128, 128)
    results = []
    for width in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda width=width: width)
        inputs = build(StateCase("", layer, MODES * 3, dims), CPU)
        inputs.run(NUMBA)
        results.append((bits(inputs.out), bits(inputs.memory)))
    assert all(
        torch.equal(a, b) for one in results[1:] for a, b in zip(results[0], one, strict=True)
    )


def test_a_state_in_a_page_is_copied_as_a_block():
    inputs = build(StateCase("", "delta", MODES, pages="aligned"), CPU)
    state, before = inputs.state, bits(inputs.memory)
    source, target = int(inputs.batch.read_slots[0]), int(inputs.batch.write_slots[0])
    NUMBA.copy_blocks([state], torch.tensor([[source, target]]))
    assert torch.equal(state[target], state[source])
    state[target] = math.nan
    assert torch.equal(bits(inputs.memory), before)


def test_a_state_past_2_to_the_31_elements(tmp_path):
    """In a sparse file: no memory is used."""
    shape = (70_000, 4, 128, 64)
    count = math.prod(shape)
    assert count > 1 << 31
    file = str(tmp_path / "states")
    far = torch.from_file(file, shared=True, size=count, dtype=torch.float32).view(shape)
    query, key, value = torch.randn(1, 2, 128), torch.randn(1, 2, 128), torch.randn(1, 4, 64)
    decay, beta, outs = -torch.rand(1, 4), torch.rand(1, 4), []
    terms, near = LinearAttentionTerms(0.1, delta_rule=True), torch.zeros(1, *shape[1:])
    for state, slot in ((far, 69_999), (near, 0)):
        where = torch.tensor([slot], dtype=torch.int32)
        for _ in range(2):
            out = NUMBA.linear_attention_step(
                query, key, value, decay, beta, state, StateBatch(where, where), terms
            )
        outs.append(out)
    assert torch.equal(*outs)
    assert torch.equal(far[69_999], near[0])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_RECORDS = [
    (lambda: StateBatch(torch.tensor([1]), ints(1)), "read_slots", "torch.int32"),
    (lambda: StateBatch(ints(1), ints(1, 2)), "write_slots", r"shape \[1\]"),
    (lambda: StateBatch(ints(1), ints(1), ints(0)), "query_start_loc", r"shape \[2\]"),
    (lambda: StateBatch(ints(1), ints(1), None, ints(1)), "num_stored", "query_start_loc"),
    (lambda: ShortConvTerms(torch.zeros(4, 1)), "terms.weight", "a width of at least 2"),
    (lambda: ShortConvTerms(torch.zeros(2, 4).T), "terms.weight", "contiguous"),
    (lambda: ShortConvTerms(torch.zeros(4, 2), torch.zeros(3)), "terms.bias", r"shape \[4\]"),
    (lambda: LinearAttentionTerms(math.inf, delta_rule=True), "terms.scale", "finite"),
    (lambda: DecayGate(torch.zeros(2).half()), "terms.gate.a", "torch.float32"),
    (lambda: DecayGate(torch.zeros(2), torch.zeros(3)), "terms.gate.bias", r"shape \[2\]"),
    (lambda: DecayGate(torch.zeros(2), None, (2.0, 1.0)), "terms.gate.limits", "a range"),
]


@pytest.mark.parametrize(("make", "name", "wanted"), BAD_RECORDS)
def test_a_record_refuses_a_bad_field(make, name, wanted):
    with pytest.raises(InvalidArgumentError, match=wanted) as caught:
        make()
    assert caught.value.argument == name


GATE = DecayGate(-torch.ones(3))
BAD_CALLS = [
    ({"query": torch.zeros(2, 2, 8)}, "query", "a divisor of 4 heads"),
    ({"query": torch.zeros(2, 4, 7)}, "query", r"shape \[2, any, 8\]"),
    ({"key": None}, "key", "a tensor"),
    ({"value": torch.zeros(2, 4, 6).half()}, "value", "torch.float32"),
    ({"decay": torch.zeros(2, 4).half()}, "decay", "torch.float32"),
    ({"decay": torch.zeros(2, 4, 6)}, "decay", r"shape \[2, 4, 8\]"),
    ({"beta": None}, "beta", "with the delta rule"),
    ({"state": torch.zeros(5, 4, 6, 8).mT}, "state", "contiguous"),
    ({"state": torch.zeros(5, 4, 8, 6).double()}, "state", "torch.float32"),
    ({"terms": LinearAttentionTerms(1.0, delta_rule=True, gate=GATE)}, "terms.gate.a", "shape"),
    ({"out": torch.zeros(2, 4, 5)}, "out", "shape"),
    ({"batch": StateBatch(ints(0, 5), ints(1, 2))}, "batch.read_slots[1]", "a slot below 5"),
    ({"batch": StateBatch(ints(0, 1), ints(5, 2))}, "batch.write_slots[0]", "a slot below 5"),
    (
        {"batch": StateBatch(ints(0, 1), ints(2, 3), ints(0, 1, 3))},
        "batch.query_start_loc[2]",
        "ascending rows up to 2",
    ),
    (
        {"batch": StateBatch(ints(0, 1), ints(2, 3), ints(0, 1, 2), ints(1, 2))},
        "batch.num_stored[1]",
        "at most the sequence's rows",
    ),
]
BAD_CALLS[0] = ({"query": torch.zeros(2, 3, 8), "key": torch.zeros(2, 3, 8)}, *BAD_CALLS[0][1:])


@pytest.mark.parametrize(("changes", "name", "wanted"), BAD_CALLS)
def test_a_call_refuses_a_bad_argument_and_writes_nothing(changes, name, wanted):
    given = {
        "query": torch.ones(2, 2, 8), "key": torch.ones(2, 2, 8), "value": torch.ones(2, 4, 6),
        "decay": torch.zeros(2, 4), "beta": torch.ones(2, 4), "state": torch.zeros(5, 4, 8, 6),
        "batch": StateBatch(ints(0, 1), ints(2, 3)),
        "terms": LinearAttentionTerms(1.0, delta_rule=True),
    }  # fmt: skip
    NUMBA.linear_attention_step(**given)  # known by its signature from here on
    given["state"].zero_()
    given |= changes
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=wanted) as caught:
            NUMBA.linear_attention_step(**given)
        assert caught.value.argument == name
        assert not given["state"].any()


def test_a_backend_refuses_states_that_it_has_not():
    terms, batch = ShortConvTerms(torch.zeros(4, 3)), StateBatch(ints(0), ints(1))
    state = torch.zeros(2, 2, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="state"):
        NUMBA.short_conv_step(torch.zeros(1, 4), state, batch, terms)
