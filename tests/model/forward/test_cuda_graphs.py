"""What a graph is replayed from, without a graph: the same steps, run where they were loaded."""

import contextlib
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import backends
import kvcore
from model import EngineConfig, SamplingParams, Submission
from model.attention.shared_prefix import Worth
from model.compile.few_rows import FEW_ROWS
from model.engine import Engine
from model.forward.cuda_graphs import Bucket, Buckets, CudaGraphs, _passed
from model.forward.network import PagedNetwork
from model.forward.warm_up import Prepared, captured_tokens, compiled_tokens
from model.sample import sampler
from model.sample.draw_graphs import ALL_CUTS, Cuts, DrawGraphs, is_captured, row_terms
from tests.model import recurrent_networks
from tests.model.networks import build, random_adapter

PROMPTS = ["a prompt of some length, ", "a prompt of some length, again", "x", "yz"]


@contextlib.contextmanager
def noting_batches(network):
    """Which batches a network's layers are given."""
    batches, backend = [], network._backend

    class Noting:
        def paged_attention(self, query, cache, batch, terms):
            batches.append(batch)
            return backend.paged_attention(query, cache, batch, terms)

        def __getattr__(self, name):
            return getattr(backend, name)

    network._backend = Noting()
    try:
        yield batches
    finally:
        network._backend = backend


class Uncaptured(CudaGraphs):
    """Launches anew what a graph would launch, on a batch that holds nothing of another step."""

    def replay(self, step, bucket):
        self._load(step, bucket)
        with noting_batches(self._network) as batches:
            logits, most_likely = self._run(bucket)
        # A GPU copies them to the host before its next step writes there.
        logits, most_likely = logits.clone(), tuple([each.clone() for each in most_likely])
        places = {id(batch.kept): batch.kept for batch in batches}
        assert list(places.values()) == [{}] * len(step.paged)
        self.seen = [*getattr(self, "seen", []), bucket]
        passed = _passed(len(step.logit_rows), logits, most_likely, bucket)
        self.draws.lying = passed.place, logits, most_likely
        return passed


class UncapturedDraws(DrawGraphs):
    """Likewise, of the logits that were computed last."""

    def choose(self, place, terms, numbers):
        its_place, *logits = self.lying
        assert place == its_place
        self.seen = {*getattr(self, "seen", ()), terms.cuts}
        rows = self._load(terms, numbers)
        return self._run(terms.cuts, *logits)[:rows]


class KeepsOldTokens(Uncaptured):
    """Tokens to spare still store what they stored last."""

    def _load(self, step, bucket):
        inputs = self._inputs[bucket.longest == 1].whole
        before = [slots.clone() for slots in inputs.slots]
        super()._load(step, bucket)
        tokens, rows = step.paged[0].num_tokens, step.paged[0].num_seqs
        for slots, old in zip(inputs.slots, before, strict=True):
            slots[tokens : bucket.tokens] = old[tokens : bucket.tokens]
        if bucket.longest == 1:
            inputs.query_start_loc[rows + 1 : bucket.rows + 1] = torch.arange(
                rows + 1, bucket.rows + 1
            )


class TakesWhatTheHostHas(Uncaptured):
    """A token that was drawn and not read is taken for the entry that stands in for it."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        self._inputs[bucket.longest == 1].whole.sources.fill_(-1)


class DrawsFromTheFirstTokens(Uncaptured):
    """The rows of logits are those of the first tokens, as in steps of one token a sequence."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        rows = self._inputs[bucket.longest == 1].whole.logit_rows
        rows.copy_(torch.arange(len(rows)))


class GivesSpareRowsTheLastTokens(Uncaptured):
    """Sequences to spare begin where they began in a step before."""

    def _load(self, step, bucket):
        starts = self._inputs[bucket.longest == 1].whole.query_start_loc
        before = starts.clone()
        super()._load(step, bucket)
        rows = step.paged[0].num_seqs
        starts[rows + 1 : bucket.rows + 1] = before[rows + 1 : bucket.rows + 1]


def tokens_of(graphs_type, architecture, *, is_async, params, max_tokens=40, shares=False):
    backend = backends.get_backend("numba")
    sizes = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40}
    engine = Engine(
        build(architecture, 5), backend, EngineConfig(**sizes, async_scheduling=is_async)
    )
    widths = [64] * len(engine.kv.groups)
    graphs = None
    if graphs_type is not None:
        draws = UncapturedDraws(5, torch.device("cpu"))
        graphs = graphs_type(engine.network, engine._runner.drawn, widths, 4, 5, max_tokens, draws)
        engine._runner.use(Prepared("", graphs))
    done = engine.generate(PROMPTS, params)
    if graphs is not None:
        assert sum(bucket.longest == 1 for bucket in graphs.seen) > 10
        assert any(bucket.longest > 1 for bucket in graphs.seen) == (max_tokens > 0)
        assert max_tokens < 40 or len(graphs.seen) == engine.stats.num_steps
        assert any(bucket.shares for bucket in graphs.seen) == shares
        assert hasattr(draws, "seen") == (params is not PARAMS)
    return [one.request.output_tokens for one in done]


PARAMS = [SamplingParams(max_tokens=length) for length in (20, 9, 14, 17)]
CUTS = ({}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.1})
DRAWN = [
    SamplingParams(max_tokens=14, temperature=1.0, seed=seed, **how)
    for seed, how in enumerate(CUTS)
]
APART = [
    SamplingParams(max_tokens=14, repetition_penalty=1.5, frequency_penalty=0.3),
    DRAWN[1],
    SamplingParams(max_tokens=14, temperature=1.0, seed=5, presence_penalty=0.5, top_p=0.9),
    SamplingParams(max_tokens=14, temperature=1.0, seed=6, top_k=100),
]
"""One of them is drawn as was recorded, beside rows that are not."""


@functools.cache
def wanted_of(architecture, draws, apart=False):
    params = APART if apart else DRAWN if draws else PARAMS
    return tokens_of(None, architecture, is_async=False, params=params)


@pytest.mark.parametrize(
    ("architecture", "is_async", "max_tokens"),
    [("qwen3", False, 40), ("qwen3", True, 24), ("gemma2", True, 40), ("gemma2", False, 0)],
)
@pytest.mark.parametrize("draws", [False, True])
def test_steps_in_a_graphs_tensors_give_the_tokens_of_steps_as_they_are(
    architecture, is_async, max_tokens, draws
):
    how = {"is_async": is_async, "max_tokens": max_tokens, "params": DRAWN if draws else PARAMS}
    assert tokens_of(Uncaptured, architecture, **how) == wanted_of(architecture, draws)


@pytest.mark.parametrize("is_async", [False, True])
def test_rows_that_were_not_recorded_leave_the_others_in_their_graph(is_async):
    found = tokens_of(Uncaptured, "qwen3", is_async=is_async, params=APART)
    assert found == wanted_of("qwen3", draws=True, apart=True)


BUGS_OF_ROWS_APART = {
    "stay in the graph": ("is_captured", lambda *_: True),
    "are drawn in vain": ("_Apart.put", lambda _, whole, own: whole),
    "take others' logits": (
        "_Apart._of",
        lambda rows, whole: whole if rows.rows is None else whole[: len(rows.rows)],
    ),
}


@pytest.mark.parametrize("name", BUGS_OF_ROWS_APART)
def test_a_planted_bug_of_rows_that_leave_their_graph_shows(name, monkeypatch):
    where, bug = BUGS_OF_ROWS_APART[name]
    wanted = wanted_of("qwen3", draws=True, apart=True)
    monkeypatch.setattr(f"model.sample.request_sampler.{where}", bug)
    assert tokens_of(Uncaptured, "qwen3", is_async=False, params=APART) != wanted


class TellsOfOneTooMany(Uncaptured):
    """The run of sequences that share is told with one that does not."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        for told in self._inputs[True].whole.shared if bucket.shares else ():
            told[1] += 1


@pytest.mark.parametrize("graphs_type", [Uncaptured, TellsOfOneTooMany])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_what_is_shared_is_told_to_a_graph_anew_in_each_step(
    architecture, graphs_type, monkeypatch
):
    def worth(network):
        return tuple(None if window else Worth(2, 0, 0, 1) for window in network.layout.windows)

    wanted = wanted_of(architecture, draws=False)
    monkeypatch.setattr(PagedNetwork, "shared_worth", worth)
    how = {"is_async": True, "params": PARAMS}
    if graphs_type is TellsOfOneTooMany:  # which the backend here sees
        with pytest.raises(backends.BackendError, match="shared_prefix"):
            tokens_of(graphs_type, architecture, **how)
    else:
        assert tokens_of(graphs_type, architecture, **how, shares=True) == wanted


@pytest.mark.parametrize(
    "bug",
    [
        KeepsOldTokens,
        TakesWhatTheHostHas,
        DrawsFromTheFirstTokens,
        GivesSpareRowsTheLastTokens,
    ],
)
def test_a_planted_bug_shows(bug):
    with contextlib.suppress(backends.BackendError):  # a batch that means nothing
        assert tokens_of(bug, "qwen3", is_async=True, params=PARAMS) != wanted_of("qwen3", False)


def states_of(graphs_type, kind, *, is_async=True, drafts=None, most=None):
    """Tokens of a network with recurrent layers, and what `generate` says to the first texts."""
    engine = recurrent_networks.engine_of(
        kind,
        max_num_seqs=5,
        max_num_batched_tokens=40,
        async_scheduling=is_async,
        drafts=drafts,
        draft_tokens=2 if drafts else None,
    )
    wanted = dict([*recurrent_networks.case(kind)[1].items()][:most])
    draws = UncapturedDraws(15, torch.device("cpu"))
    widths = [100] * len(engine.network.layout.windows)
    runner = engine._runner
    size = engine.config.block_size
    graphs = graphs_type(engine.network, runner.drawn, widths, size, 5, 64, draws, 15)
    runner.use(Prepared("", graphs))
    params = SamplingParams(max_tokens=recurrent_networks.NUM_TOKENS, ignore_eos=True)
    done = engine.generate([*map(list, wanted)], params)
    assert len(graphs.seen) == engine.stats.num_steps
    assert {bucket.longest for bucket in graphs.seen} >= ({1} if most else {1, 16, 32})
    return [one.request.output_tokens for one in done], [*wanted.values()]


REPLAYED = recurrent_networks.KINDS[:3]


@pytest.mark.parametrize("kind", REPLAYED)
@pytest.mark.parametrize("is_async", [False, True])
def test_steps_with_states_in_a_graphs_tensors_give_the_tokens_of_generate(kind, is_async):
    got, wanted = states_of(Uncaptured, kind, is_async=is_async)
    assert got == wanted


@pytest.mark.parametrize("kind", REPLAYED)
def test_steps_with_draft_tokens_of_a_network_with_states_are_replayed(kind):
    got, wanted = states_of(Uncaptured, kind, is_async=False, drafts="ngram")
    assert got == wanted


class GivesSpareRowsTheFirstState(Uncaptured):
    """Rows to spare read and write the state of the first sequence."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        words, count = self._states._words, step.paged[0].num_seqs
        words[:-1, count : bucket.rows] = words[:-1, :1]


class ReadsWhatIsWritten(Uncaptured):
    """A state is read where the new one goes."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        words, pieces = self._states._words, self._network.blocks_per_state
        words[:pieces] = words[pieces:-1]


class StoresFewerTokens(Uncaptured):
    """A state is stored before the last token of a chunk."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        stored = self._states._words[-1]
        stored.copy_((stored - 1).clamp(min=1).minimum(stored))


@pytest.mark.parametrize(
    "bug", [GivesSpareRowsTheFirstState, ReadsWhatIsWritten, StoresFewerTokens]
)
def test_a_planted_bug_of_states_in_a_graph_shows(bug):
    got, wanted = states_of(bug, REPLAYED[0], most=3)  # one row to spare in every step
    assert got != wanted


@pytest.mark.parametrize("kind", REPLAYED)
def test_rows_to_spare_change_no_state(kind):
    engine = recurrent_networks.engine_of(kind, max_num_seqs=5)
    network = engine.network
    draws = UncapturedDraws(5, torch.device("cpu"))
    widths = [100] * len(engine.network.layout.windows)
    graphs = Uncaptured(network, engine._runner.drawn, widths, 4, 5, 16, draws)
    for storage in network.caches.storages:
        storage.random_(0, 100)
    before = [storage.clone() for storage in network.caches.storages]
    graphs._run(Bucket(5, 5, 1))
    graphs._run(Bucket(16, 5, 16))
    for storage, old in zip(network.caches.storages, before, strict=True):
        assert torch.equal(storage, old)


@given(
    st.integers(1, 600), st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 700), st.data()
)
def test_a_step_has_the_smallest_bucket_with_room_for_it(most, max_tokens, tokens, rows, data):
    max_rows = data.draw(st.sampled_from([0, most, 3 * most]))  # with two drafts each
    buckets = Buckets(most, max_tokens, max_rows)
    longest = data.draw(st.sampled_from([1, min(2, tokens), tokens]))
    every = [*buckets.singles, *buckets.mixed]
    assert sorted(set(every[: len(buckets.singles)])) == list(buckets.singles)
    assert sorted(set(buckets.mixed)) == list(buckets.mixed)
    assert all(size.rows <= max(2, most) for size in buckets.singles)
    assert all(size.rows <= min(size.tokens, max(2, most, max_rows)) for size in every)
    rooms = [
        size
        for size in every
        if tokens <= size.tokens and rows <= size.rows and longest <= size.longest
    ]
    found = buckets.smallest(tokens, rows, longest)
    if not rooms:
        assert found is None
        assert max(tokens, rows) > max_tokens or rows > max(most, max_rows) or max_tokens < 2
    elif longest == 1 and rooms[0].longest == 1:
        assert found == rooms[0]
    else:
        assert found == min(size for size in rooms if size.longest > 1)


@pytest.mark.parametrize("most", [1, 2, 3, 64, 65, 256, 1000])
def test_every_step_of_one_token_each_has_a_bucket_with_few_rows_to_spare(most):
    buckets = Buckets(most, 0)
    assert buckets.singles[-1] == Bucket(max(2, most), max(2, most), 1)
    for rows in range(1, most + 1):
        found = buckets.smallest(rows, rows, 1)
        assert found is not None
        assert found.rows <= rows + max(rows, 32)
    assert buckets.smallest(most + 2, most + 2, 1) is None


def test_steps_of_several_tokens_have_few_tokens_to_spare():
    buckets = Buckets(256, 8192)
    assert len(buckets.mixed) <= 64
    for tokens in range(16, 8193):
        found = buckets.smallest(tokens, 1, tokens)
        assert found is not None
        assert found.tokens < (2 if tokens < 256 else 1.5) * tokens + 1
    assert buckets.smallest(17, 1, 17) == Bucket(32, 1, 32)
    assert buckets.smallest(17, 9, 9) == Bucket(32, 16, 32)
    assert buckets.smallest(8193, 1, 8193) is None


def test_steps_are_recorded_up_to_where_the_device_is_busier_than_the_host():
    config = EngineConfig(max_num_batched_tokens=100_000)
    assert captured_tokens(596_000_000, 28, config) > 4096
    assert 256 <= captured_tokens(8_000_000_000, 36, config) < 1024
    assert captured_tokens(70_000_000_000, 80, config) == 256
    assert captured_tokens(1_000_000, 4, config) == 8192
    assert captured_tokens(1_000_000, 4, EngineConfig(max_num_batched_tokens=100)) == 100


def test_what_all_steps_run_in_is_compiled_with_a_step_that_has_no_pieces_of_its_own():
    assert [compiled_tokens(most) for most in (1, 2, 4, 5, 40, 8192)] == [5, 5, 5, 5, 40, 512]
    assert max(FEW_ROWS) == 4


PARAMS_OF_A_ROW = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1e-7, 50.0]),
    top_k=st.sampled_from([None, 1, 5, 64, 200]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.2]),
)


@given(st.lists(PARAMS_OF_A_ROW, min_size=1, max_size=6), st.sampled_from([50, 300]), st.data())
def test_rows_are_drawn_in_the_columns_of_a_graph_as_each_alone(params, vocab_size, data):
    seed = data.draw(st.integers(0, 2**31))
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    stay = [is_captured(how, vocab_size) for how in params]
    assert stay == [how.is_greedy or how.top_k != 200 or vocab_size < 200 for how in params]
    known = [how if stays else None for how, stays in zip(params, stay, strict=True)]
    terms = row_terms(known, vocab_size)
    if terms is None:
        assert all(how is None or how.is_greedy for how in known)
        return
    draws = DrawGraphs(8, torch.device("cpu"))
    alone = [sampler.Draw(how, seed, row) for row, how in enumerate(params)]
    others = row_terms([SamplingParams(temperature=2.0, top_k=3)] * 8, vocab_size)
    draws._load(others, data.draw(st.just([0.5] * 8)))  # what was there before
    numbers = [alone[row].uniform() for row in terms.drawing]
    rows = draws._load(terms, numbers)
    every = [
        cuts for cuts in ALL_CUTS if all(a >= b for a, b in zip(cuts, terms.cuts, strict=True))
    ]
    for cuts in every:  # cuts that no row has change nothing
        tokens = draws._run(cuts, logits, logits.max(dim=-1))[:rows]
        wanted = sampler.sample(logits[:rows], alone)
        pairs = list(zip(tokens.tolist(), wanted, strict=True))
        assert all(came == want for (came, want), stays in zip(pairs, stay, strict=True) if stays)


MIXED_ADAPTERS = (None, "a", "b", "a")


def engine_with_adapters(**fields):
    sizes = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40}
    config = EngineConfig(**sizes, max_loras=3, max_lora_rank=4, **fields)
    engine = Engine(build("qwen3", 5), backends.get_backend("numba"), config)
    for seed, name in enumerate(("b", "a")):
        engine.add_adapter(random_adapter(engine.model.network, name, seed))
    return engine


def adapted_tokens(graphs_type, *, is_async=True, names=MIXED_ADAPTERS):
    engine = engine_with_adapters(async_scheduling=is_async)
    if graphs_type is not None:
        draws = UncapturedDraws(5, torch.device("cpu"))
        drawn = engine._runner.drawn
        graphs = graphs_type(engine.network, drawn, [64], 4, 5, 40, draws)
        engine._runner.use(Prepared("", graphs))
    requests = [
        engine.submit(Submission(prompt, how, namespace=kvcore.Namespace(lora_name=name)))[0]
        for prompt, how, name in zip(PROMPTS, DRAWN, names, strict=True)
    ]
    while engine.has_unfinished:
        engine.step()
    if graphs_type is not None:
        assert len(graphs.seen) == engine.stats.num_steps
        assert {bucket.adapted for bucket in graphs.seen} == ({True} if any(names) else {False})
        assert {bucket.longest == 1 for bucket in graphs.seen} == {False, True}
    return [request.output_tokens for request in requests]


@functools.cache
def wanted_of_adapters():
    wanted = adapted_tokens(None, is_async=False)
    alone = [adapted_tokens(None, is_async=False, names=(name,) * 4) for name in (None, "a", "b")]
    assert wanted == [alone[0][0], alone[1][1], alone[2][2], alone[1][3]]
    assert len({str(tokens) for tokens in alone}) == 3
    return wanted


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_with_adapters_in_a_graphs_tensors_give_the_tokens_of_steps_as_they_are(is_async):
    assert adapted_tokens(Uncaptured, is_async=is_async) == wanted_of_adapters()


def test_steps_without_adapters_use_the_graphs_of_a_network_without():
    plain = adapted_tokens(Uncaptured, names=(None,) * 4)
    assert plain == wanted_of("qwen3", draws=True)


class KeepsOldAdapters(Uncaptured):
    """Tokens have the adapters of a step before."""

    def _load(self, step, bucket):
        slots = self._inputs[bucket.longest == 1].whole.adapter_slots
        before = slots.clone()
        super()._load(step, bucket)
        slots.copy_(before)


class GivesAdaptersToSequences(Uncaptured):
    """The adapters of the first tokens are those of the first sequences."""

    def _load(self, step, bucket):
        super()._load(step, bucket)
        slots = self._inputs[bucket.longest == 1].whole.adapter_slots
        starts = step.paged[0].query_start_loc[:-1]
        slots[: len(starts)] = step.adapter_slots[starts]


@pytest.mark.parametrize("bug", [KeepsOldAdapters, GivesAdaptersToSequences])
def test_a_planted_bug_of_adapters_in_a_graph_shows(bug):
    assert adapted_tokens(bug) != wanted_of_adapters()


class Counting:
    """Runs each call instead of capturing it, and records the calls of each kind."""

    def __init__(self, device):
        self.device = device
        self.kinds = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def capture(self, run, kind):
        self.kinds.setdefault(kind, []).append(run.args[0])
        run()
        return None, run()


@pytest.mark.parametrize("has_adapters", [False, True])
def test_adapters_double_the_graphs_however_many_there_are(has_adapters, monkeypatch):
    monkeypatch.setattr("model.forward.cuda_graphs.GraphCapturer", Counting)
    if has_adapters:
        engine = engine_with_adapters()
    else:
        engine = Engine(build("qwen3", 5), backends.get_backend("numba"), EngineConfig())
    draws = DrawGraphs(5, torch.device("cpu"))
    graphs = CudaGraphs(engine.network, engine._runner.drawn, [64], 4, 5, 40, draws)
    num_singles, num_mixed = len(graphs.buckets.singles), len(graphs.buckets.mixed)
    assert graphs.capture() == (1 + has_adapters) * (num_singles + num_mixed)
    rows = {bucket.rows for bucket in graphs.buckets.mixed}  # which share their logits
    assert len(draws._graphs) == len(ALL_CUTS) * ((1 + has_adapters) * num_singles + len(rows))
    before = {place: tensor.data_ptr() for place, (_, tensor) in draws._graphs.items()}
    assert len({*before.values()}) == len(before)
    if has_adapters:  # another one is written where the captured products are
        halves = [halves.down.data_ptr() for halves in engine.network.adapters._halves.values()]
        engine.add_adapter(random_adapter(engine.model.network, "c", 7))
        assert halves == [one.down.data_ptr() for one in engine.network.adapters._halves.values()]


def test_what_runs_normally_once_has_the_kernels_of_all_that_are_captured_like_it(monkeypatch):
    counting = Counting(torch.device("cpu"))
    monkeypatch.setattr("model.forward.cuda_graphs.GraphCapturer", lambda _: counting)
    engine = engine_with_adapters()
    draws = DrawGraphs(5, counting.device)
    graphs = CudaGraphs(engine.network, engine._runner.drawn, [64], 4, 5, 40, draws)
    shared = [bucket._replace(shares=True) for bucket in graphs.buckets.singles]
    monkeypatch.setattr(graphs, "_sharing", lambda: shared)
    graphs.capture()
    steps = [kind for kind, first in counting.kinds.items() if isinstance(first[0], Bucket)]
    for kind in steps:
        alike = counting.kinds[kind]
        assert len({(one.longest == 1, one.shares, one.adapted) for one in alike}) == 1
        assert len({one.tokens in FEW_ROWS for one in alike}) == 1
        assert alike[0] == max(alike)  # whose buffers serve the others
    assert {*counting.kinds} - {*steps} == {*ALL_CUTS}
    assert all({*counting.kinds[cuts]} == {cuts} for cuts in ALL_CUTS)


def test_only_cuts_that_a_row_asks_for_are_made():
    def cuts_of(*how):
        return row_terms([SamplingParams(temperature=t, **cut) for t, cut in how], 1000).cuts

    assert cuts_of((1.0, {}), (0.0, {})) == Cuts(ranked=False, nuclear=False)
    assert cuts_of((1.0, {"top_k": 3, "top_p": 0.5})) == Cuts(ranked=True, nuclear=False)
    assert cuts_of((1.0, {"top_p": 0.5})) == Cuts(ranked=False, nuclear=True)
    assert cuts_of((1.0, {"top_p": 0.5}), (1.0, {"top_k": 5})) == Cuts(ranked=True, nuclear=True)
    assert row_terms([SamplingParams()], 1000) is None
