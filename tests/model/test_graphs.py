"""What a graph is replayed from, without a graph: the same steps, run where they were loaded."""

import contextlib

import pytest
import torch

import backends
from model import EngineConfig, SamplingParams
from model.device.cuda_graphs import DecodeGraphs, bucket_sizes
from model.device.prepare import Prepared
from model.engine import Engine
from tests.model.networks import build

PROMPTS = ["a prompt of some length, ", "a prompt of some length, again", "x", "yz"]


class Unrecorded(DecodeGraphs):
    """Launches anew what a graph would launch."""

    count = 0

    def replay(self, step):
        rows = step.paged[0].num_seqs
        size = next(size for size in self._sizes if size >= rows)
        self._load(step, rows, size)
        logits, (best, tokens) = self._run(size)
        self.count += 1
        return logits[:rows], (best[:rows], tokens[:rows])


class KeepsOldRows(Unrecorded):
    """Rows to spare still store what they stored last."""

    def _load(self, step, rows, size):
        before = [slots.clone() for slots in self._inputs.whole.slots]
        super()._load(step, rows, size)
        for slots, old in zip(self._inputs.whole.slots, before, strict=True):
            slots[rows:size] = old[rows:size]
        self._inputs.whole.query_start_loc[rows + 1 : size + 1] = torch.arange(rows + 1, size + 1)


class TakesWhatTheHostHas(Unrecorded):
    """A token that was drawn and not read is taken for the entry that stands in for it."""

    def _load(self, step, rows, size):
        super()._load(step, rows, size)
        self._inputs.whole.sources.fill_(-1)


def tokens_of(graphs_type, architecture, *, is_late, params):
    backend = backends.get_backend("numba")
    sizes = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40}
    engine = Engine(
        build(architecture, 5), backend, EngineConfig(**sizes, async_scheduling=is_late)
    )
    widths = [64] * len(engine.kv.groups)
    graphs = None
    if graphs_type is not None:
        graphs = graphs_type(engine.network, engine._passes.drawn, widths, 4, 5)
        engine._passes.use(Prepared("", graphs))
    done = engine.generate(PROMPTS, params)
    assert graphs is None or graphs.count > 10
    return [one.request.output_tokens for one in done]


PARAMS = [SamplingParams(max_tokens=length) for length in (20, 9, 14, 17)]
DRAWN = [SamplingParams(max_tokens=14, temperature=1.0, seed=seed) for seed in range(4)]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("params", [PARAMS, DRAWN])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_steps_in_the_rows_of_a_graph_give_the_tokens_of_steps_as_they_are(
    architecture, params, is_late
):
    wanted = tokens_of(None, architecture, is_late=False, params=params)
    assert tokens_of(Unrecorded, architecture, is_late=is_late, params=params) == wanted


@pytest.mark.parametrize("bug", [KeepsOldRows, TakesWhatTheHostHas])
def test_a_planted_bug_shows(bug):
    wanted = tokens_of(None, "qwen3", is_late=True, params=PARAMS)
    with contextlib.suppress(backends.BackendError):  # a batch that means nothing
        assert tokens_of(bug, "qwen3", is_late=True, params=PARAMS) != wanted


@pytest.mark.parametrize("most", [1, 2, 3, 64, 65, 256, 1000])
def test_every_batch_has_a_graph_with_few_rows_to_spare(most):
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max(2, most)
    for rows in range(2, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < rows + max(rows, 32)
