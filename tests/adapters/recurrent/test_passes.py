"""Modules with states in packed rows: each sequence from its own state, drafts without a trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kvcore.adapters.recurrent import (
    HeldStates,
    RecurrentPass,
    Run,
    StateKey,
    StateShape,
    StateStep,
    divide,
    is_divided,
    passes,
    state_views,
    undivide,
)

WIDTH = 3
SHAPES = [
    StateShape(StateKey(0, "conv", 0), (1, WIDTH - 1), torch.float64),
    StateShape(StateKey(0, "recurrent", 0), (1,), torch.float64),
]


class Mixer(nn.Module):
    """Adds the last three inputs to the sum of all; updates its states in place, one at a time."""

    def forward(self, rows, past_key_values=None, scale=None):
        """[num_seqs, tokens, 1] to the same, and something that has no rows."""
        inputs = rows.transpose(1, 2)
        total = torch.zeros(len(rows), 1, dtype=rows.dtype)
        if past_key_values is not None:
            total, before = self.read(past_key_values)
            if total is None:
                total = torch.zeros(len(rows), 1, dtype=rows.dtype)
                past_key_values.update_recurrent_state(total, 0)
            if before is not None and rows.shape[1] == 1:
                inputs = torch.cat([before, inputs], -1)
                before.copy_(inputs[..., 1 - WIDTH :])
            else:
                inputs = past_key_values.update_conv_state(inputs, 0, conv_kernel_size=WIDTH)
        inputs = nn.functional.pad(
            inputs, (max(0, WIDTH - 1 + rows.shape[1] - inputs.shape[-1]), 0)
        )
        near = inputs.unfold(-1, WIDTH, 1).sum(-1)[..., -rows.shape[1] :].transpose(1, 2)
        far = total[:, None] + rows.cumsum(1)
        total.copy_(far[:, -1])
        scaled = (near + 1000 * far) * (1 if scale is None else scale)
        return scaled, torch.zeros(2)

    def read(self, cache):
        return cache.get_recurrent_state(0), cache.get_conv_state(0)


class MixerByLayer(Mixer):
    """Reads its states by layer, as modules did before Transformers 5.21."""

    def read(self, cache):
        if not cache.has_previous_state(0, state_idx=0):
            return None, None
        layer = cache.layers[0]
        assert not layer.record_past
        return layer.recurrent_states[0], layer.conv_states[0]


def fresh():
    pages = torch.full((40, 256), 255, dtype=torch.uint8)  # NaN: blocks hold anything before
    return state_views(SHAPES, pages)


def whole(tokens):
    """What the module gives for a text in one call."""
    mixer = Mixer()
    return mixer(torch.tensor(tokens, dtype=torch.float64)[None, :, None])[0][0, :, 0].tolist()


@st.composite
def texts(draw):
    """Some texts, and how each is cut: known tokens and drafts of every step."""
    tokens = st.lists(st.integers(1, 99), min_size=1, max_size=12)
    cuts = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=12, max_size=12)
    return draw(st.lists(st.tuples(tokens, cuts), min_size=1, max_size=5))


@given(
    cut=texts(),
    token_by_token=st.booleans(),
    in_place=st.booleans(),
    kind=st.sampled_from([Mixer, MixerByLayer]),
)
def test_rows_of_packed_sequences_are_those_of_each_text_alone(cut, token_by_token, in_place, kind):
    mixer, tensors = kind(), fresh()
    divide([mixer])
    done, block = [0] * len(cut), [0] * len(cut)
    drafts = [77, 5, 31]
    step_number = 0
    while any(done[n] < len(text) for n, (text, _) in enumerate(cut)):
        runs, rows, wanted, reads, writes, start = [], [], [], [], [], 0
        live = [n for n, (text, _) in enumerate(cut) if done[n] < len(text)]
        for n in live:
            text, cuts = cut[n]
            known, ahead = cuts[step_number]
            stop = min(done[n] + known, len(text))
            tokens = text[done[n] : stop] + drafts[:ahead]
            runs.append(Run(start, stop - done[n], ahead, done[n] > 0))
            start += len(tokens)
            rows += tokens
            wanted += whole(text[:stop] + drafts[:ahead])[done[n] :]
            reads.append([block[n]])
            block[n] = block[n] if in_place and block[n] else 1 + n + 6 * (step_number % 2)
            writes.append([block[n]])
            done[n] = stop
        before = {key: state.blocks.clone() for key, state in tensors.items()}
        step = StateStep(tuple(runs), torch.tensor(reads), torch.tensor(writes))
        passing = RecurrentPass(tensors, step, token_by_token=token_by_token)
        scale = torch.full((1, len(rows), 1), 2.0, dtype=torch.float64)
        given_rows = torch.tensor(rows, dtype=torch.float64)[None, :, None]
        out, _ = mixer(given_rows, past_key_values=passing, scale=scale)
        assert (out[0, :, 0] / 2).tolist() == wanted
        others = [number for number in range(40) if [number] not in writes]
        for key, state in tensors.items():  # nothing else is written
            assert torch.equal(
                state.blocks[others].view(torch.int64), before[key][others].view(torch.int64)
            )
        step_number += 1


def test_a_layer_has_a_state_once_it_has_stored_one_of_this_number():
    cache = HeldStates({}, None)
    cache.update_conv_state(torch.zeros(1, 1, 2), 3, state_idx=1)
    assert cache.has_previous_state()
    assert cache.has_previous_state(3)
    assert cache.has_previous_state(3, state_idx=1)
    assert not cache.has_previous_state(3, state_idx=0)
    assert not cache.has_previous_state(2)


def test_keys_and_values_go_to_the_cache_of_a_batch_if_the_pass_has_one():
    class Doubling:
        def update(self, key_states, value_states, layer_idx, kwargs):
            kwargs["layer"] = layer_idx
            return key_states * 2, value_states * 2

    passing, key, told = RecurrentPass.of_fresh([1]), torch.ones(1, 1, 1, 4), {}
    assert passing.update(key, key, 5, kwargs=told) == (key, key)
    passing.kv_cache = Doubling()
    found, _ = passing.update(key, key, 5, kwargs=told)
    assert torch.equal(found, key * 2)
    assert told == {"layer": 5}


@pytest.mark.parametrize("planted", ["drafts are stored", "the state is not read", "never stored"])
def test_a_pass_that_keeps_other_states_is_noticed(monkeypatch, planted):
    batches = passes._batches

    def changed(step, *, token_by_token):
        runs = [
            run._replace(num_known=run.num_known + run.num_drafts, num_drafts=0)
            if planted == "drafts are stored"
            else run._replace(has_state=False)
            for run in step.runs
        ]
        return batches(StateStep(tuple(runs), step.read, step.write), token_by_token=token_by_token)

    if planted == "never stored":
        monkeypatch.setattr(HeldStates, "store", lambda *_: None)
    else:
        monkeypatch.setattr(passes, "_batches", changed)
    check = test_rows_of_packed_sequences_are_those_of_each_text_alone.hypothesis.inner_test
    cut = [([3, 1, 4, 1, 5, 9], [(2, 1)] * 12)]
    with pytest.raises(AssertionError):
        check(cut, token_by_token=False, in_place=False, kind=Mixer)
    monkeypatch.undo()
    check(cut, token_by_token=False, in_place=False, kind=Mixer)


def test_a_pass_without_our_cache_runs_as_before():
    mixer = Mixer()
    assert not is_divided(mixer)
    divide([mixer])
    divided = mixer.forward
    divide([mixer])
    assert mixer.forward is divided
    assert is_divided(mixer)
    text = [3, 1, 4, 1, 5]
    assert mixer(torch.tensor(text, dtype=torch.float64)[None, :, None])[0][
        0, :, 0
    ].tolist() == whole(text)
    undivide(mixer)
    assert not is_divided(mixer)
    assert "forward" not in vars(mixer)
