"""The page for engine authors: its small engine, before and after, writes the same text."""

import importlib.util
from array import array
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcore

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "errors.md"
EXAMPLE = ROOT / "docs" / "examples" / "small_engine.py"


def load():
    spec = importlib.util.spec_from_file_location("small_engine", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small = load()
SIZE = 4
ENGINES = [
    (small.SmallEngine, small.OwnBlocks),
    (small.SmallEngine, small.KvcoreBlocks),
    (small.StepEngine, small.KvcoreBlocks),
    (small.AheadEngine, small.KvcoreBlocks),
]
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9), (2,) * 8]),
        st.lists(st.integers(0, 3), min_size=1, max_size=6),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=10,
)


class CheckedDevice(small.Device):
    """It compares every slot that it is given with the table, and keeps the widths of the calls."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.widths = set()

    def forward(self, table, slots, tokens, start):
        wanted = [self.slot(table, position) for position in range(start, len(tokens))]
        assert list(slots) == wanted
        self.widths.add(len(wanted))
        return super().forward(table, slots, tokens, start)


def alone(prompt, max_tokens):
    """What a request writes that has the device for itself."""
    device, tokens = small.Device(16, SIZE), list(prompt)
    for _ in range(max_tokens):
        tokens.append(device.forward(range(16), range(len(tokens)), tokens, 0))
    return tokens


def run(engine, blocks, drawn, num_blocks):
    requests = [small.Request([*shared, *own], count) for shared, own, count in drawn]
    made = engine(blocks(num_blocks, SIZE), CheckedDevice(num_blocks, SIZE))
    made.run(requests)
    return made, [request.tokens for request in requests]


@pytest.mark.parametrize(("engine", "blocks"), ENGINES)
@given(drawn=REQUESTS, num_blocks=st.integers(8, 24))
@example(drawn=[((1, 2, 3, 4), [0], 12)] * 8, num_blocks=8)
@settings(max_examples=40)
def test_the_engine_writes_what_each_request_writes_alone(engine, blocks, drawn, num_blocks):
    made, texts = run(engine, blocks, drawn, num_blocks)
    assert texts == [alone([*shared, *own], count) for shared, own, count in drawn]
    if blocks is small.KvcoreBlocks:
        kvcore.check(made.blocks.kv)
        assert made.blocks.kv.num_free_blocks == num_blocks - 1
        assert made.blocks.kv.leases.counts() == {}


@pytest.mark.parametrize(("engine", "blocks"), ENGINES)
def test_the_engines_preempt_and_hit(engine, blocks):
    drawn = [((1, 2, 3, 4), [0], 12)] * 8
    made, texts = run(engine, blocks, drawn, 9)
    assert made.num_preempted > 0
    assert made.device.num_written < sum(len(text) - 1 for text in texts)
    assert {1, 5} <= made.device.widths  # prompts of several tokens, and decode steps


class WritesEveryStepAsADecodeStep(small.StepEngine):
    def forward(self, todo):
        tables, slots = array("i", [0] * 64), array("q", [-1] * 64)
        self.kv.write_step(self.seqs(), tables, slots, row_stride=8)
        return super().forward(todo)


def test_an_engine_that_writes_a_prompt_as_a_decode_step_is_told():
    with pytest.raises(kvcore.InvalidArgumentError, match=r"counts: .*6 tokens to compute"):
        run(WritesEveryStepAsADecodeStep, small.KvcoreBlocks, [((1, 2, 3, 4, 5), [6], 3)], 9)


class RotatesTables(small.KvcoreBlocks):
    def table(self, request):
        ids = request.seq.block_table
        return ids[1:] + ids[:1]


class SkipsATokenBehindAHit(small.KvcoreBlocks):
    """It takes a token for cached that is not."""

    def begin(self, request):
        begun = super().begin(request)
        request.num_computed += begun
        return begun


@pytest.mark.parametrize("blocks", [RotatesTables, SkipsATokenBehindAHit])
def test_the_device_tells_a_wrong_table_from_a_right_one(blocks):
    drawn = [((), [1, 2, 3, 0, index], 12) for index in range(4)]
    wanted = [alone(own, count) for _, own, count in drawn]
    assert run(small.SmallEngine, small.KvcoreBlocks, drawn, 24)[1] == wanted
    try:
        texts = run(small.SmallEngine, blocks, drawn, 24)[1]
    except (TypeError, kvcore.KVCoreError):
        return
    assert texts != wanted


def test_the_page_names_every_error_that_a_caller_can_meet():
    page = PAGE.read_text(encoding="utf-8")
    errors = {
        name
        for name in kvcore.__all__
        if isinstance(getattr(kvcore, name), type)
        and issubclass(getattr(kvcore, name), kvcore.KVCoreError)
    }
    pool = {"BlockStateError", "DoubleFreeError", "ForeignBlockError"}  # of blocks, by hand
    for name in errors - pool - {"KVCoreError", "MisuseError"}:
        assert f"`{name}`" in page, name
