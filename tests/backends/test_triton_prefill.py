"""Prefill in the interpreter, and on a GPU by both of its paths: Hopper's and the portable one."""

import dataclasses
import importlib.util
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings

import backends
from backends.conformance import AttentionCase
from backends.conformance.attention import check_attention
from backends.conformance.cases import bits, build
from backends.conformance.relations import check_relations
from tests.backends.strategies import attention_cases

has_triton = importlib.util.find_spec("triton") is not None
if has_triton:
    consume = importlib.import_module("backends.triton_gpu.hopper.consume")
    hopper_prefill = importlib.import_module("backends.triton_gpu.hopper.prefill")
    launch = importlib.import_module("backends.triton_gpu.shared.launch")
    place_module = importlib.import_module("backends.triton_gpu.shared.place")
    driver = importlib.import_module("triton.backends.nvidia.driver")
    Place = place_module.Place
    gpus = importlib.import_module("tests.backends.gpus")
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed here")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BF16 = torch.bfloat16
MIXED = AttentionCase(
    "", ((1, 37), (9, 9), (40, 133), (0, 0), (1, 1), (150, 150), (70, 200)), padding=3, dtype=BF16
)
CUT = MIXED.with_(
    seqs=((40, 5000), (128, 3000), (0, 0), (5, 4000), (1, 700), (90, 90)), group=4, head_dim=128
)
THREE = MIXED.with_(head_dim=64, group=8, num_kv_heads=2, batch_invariant=True)
"""Three groups multiply, however few rows there are."""
MASKED = THREE.with_(window=100)
QUANTISED = {"cache_dtype": torch.float8_e4m3fn, "scales": "head"}
SHAPES = [
    *(MIXED.with_(name=f"group {g}", group=g, head_dim=128) for g in (1, 2, 3, 4, 5, 8, 12, 16)),
    *(MIXED.with_(name=f"head_dim {d}", head_dim=d) for d in (40, 64, 80, 96, 128, 160, 192, 256)),
    *(MIXED.with_(name=f"block size {n}", block_size=n) for n in (8, 16, 32, 64, 128, 256)),
    *(MIXED.with_(name=f"window {w}", window=w, group=4) for w in (1, 20, 127, 128, 129, 1000)),
    *(
        MIXED.with_(name=f"queries around {n}", seqs=((n - 1, n), (n, n), (n + 1, 2 * n), (2, n)))
        for n in (32, 64, 128)
    ),
    *(
        MIXED.with_(name=f"window {w}, block size {n}", window=w, block_size=n, group=4)
        for w, n in ((1, 64), (2, 16), (3, 128), (7, 8))
    ),
    MIXED.with_(name="one alone", seqs=((300, 300),), group=4),
    MIXED.with_(name="a chunk alone", seqs=((130, 1500),), group=4),
    MIXED.with_(name="more items than programs", seqs=((700, 900), (90, 2000)), num_kv_heads=8),
    *(
        MIXED.with_(name=f"long, {d}", head_dim=d, seqs=((700, 900), (90, 2000)), num_kv_heads=24)
        for d in (160, 192)
    ),
    MIXED.with_(name="long, window, 192", head_dim=192, seqs=((700, 2000), (9, 900)), window=300),
    MIXED.with_(name="soft cap", soft_cap=3.0),
    MIXED.with_(name="sinks", sinks=True, group=5),
    MIXED.with_(name="strided", strided=True, head_dim=80),
    MIXED.with_(name="all", window=100, soft_cap=5.0, sinks=True, strided=True, group=4),
    MIXED.with_(name="all, float16", window=33, sinks=True, dtype=torch.float16, head_dim=256),
    *(
        MIXED.with_(name=f"e4m3, {d}, {dtype}", head_dim=d, dtype=dtype, group=4, **QUANTISED)
        for d, dtype in ((64, BF16), (96, BF16), (128, BF16), (128, torch.float16), (256, BF16))
    ),
    MIXED.with_(
        name="e4m3, all",
        window=100,
        soft_cap=5.0,
        sinks=True,
        strided=True,
        head_dim=128,
        **QUANTISED,
    ),
    MIXED.with_(name="all logits equal", values="equal"),
    MIXED.with_(name="one huge logit", values="huge"),
    MIXED.with_(name="one huge logit, capped", values="huge", soft_cap=30.0),
    *(
        CUT.with_(name=f"cut, {n} of {length}", seqs=((n, length),))
        for n, length in ((2, 5000), (17, 8000), (33, 1025), (64, 1100), (128, 4100), (300, 9000))
    ),
    *(CUT.with_(name=f"cut, group {g}", group=g) for g in (1, 2, 5, 7, 8, 12, 16)),
    *(CUT.with_(name=f"cut, head_dim {d}", head_dim=d) for d in (64, 80, 160, 192, 256)),
    *(CUT.with_(name=f"cut, window {w}", window=w) for w in (1, 130, 1500)),
    CUT.with_(name="cut, block size 64", block_size=64),
    *(
        THREE.with_(name=f"three groups, window {w}", window=w, sinks=True)
        for w in (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 3000)
    ),
    *(
        case.with_(name=f"three groups, {what}, block size {n}", block_size=n, sinks=True)
        for what, case in (("no window", THREE), ("window", MASKED))
        for n in (8, 16, 32, 64, 128)
    ),
    *(
        case.with_(name=f"three groups, {what}, group {g}", group=g, dtype=torch.float16)
        for what, case in (("no window", THREE), ("window", MASKED))
        for g in (1, 3, 5, 6, 12)
    ),
    *(
        case.with_(
            name=f"three groups, {what}, queries around {n}",
            seqs=((n - 1, n), (n, n), (n + 1, n + 1), (2 * n - 1, 3 * n)),
        )
        for what, case in (("no window", THREE), ("window", MASKED))
        for n in (24, 64, 192)
    ),
    *(
        THREE.with_(
            name=f"three groups, {name}, window {window}",
            seqs=seqs,
            num_kv_heads=8,
            window=window,
            batch_invariant=False,
        )
        for window in (None, 300)
        for name, seqs in (
            ("alone", ((1000, 2049),)),
            ("700 of many", ((700, 3000),)),
            ("long", ((385, 2500), (1, 37), (193, 193), (0, 0), (191, 1000))),
        )
    ),
    THREE.with_(name="three groups, soft cap", soft_cap=3.0, sinks=True),
    THREE.with_(name="three groups, soft cap, window", soft_cap=30.0, window=200),
    THREE.with_(name="three groups, one huge logit", values="huge"),
    THREE.with_(name="three groups, strided", strided=True, head_dim=48),
    MASKED.with_(name="three groups, window, strided", strided=True, head_dim=48),
]


@pytest.fixture(params=["hopper", "portable"])
def triton(request, monkeypatch):
    """The backend with one path for everything that both can serve."""
    backend = backends.get_backend("triton")
    if request.param == "hopper":
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("this GPU is no Hopper")
        yield backend
        return
    asked = []
    monkeypatch.setattr(hopper_prefill, "can_attend", lambda *call: bool(asked.append(call)))
    yield gpus.backend_apart()
    assert asked


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_the_order_holds_and_any_scale_is_right(interpreting):
    done = interpreting.run("-m", "tests.backends.prefill_check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "prefill is right\n"


class Turns:
    """Barriers of one arrival each, and groups that take steps in a random order."""

    class BlockedError(Exception):
        """A group has to wait."""

    def __init__(self, groups):
        self.phases = [0] * groups
        self.rings = SimpleNamespace(turns=SimpleNamespace(index=lambda group: group))
        self.form = SimpleNamespace(shape=SimpleNamespace(turns=True, groups=groups))

    def wait(self, barrier, parity):
        if self.phases[barrier] & 1 == parity:
            raise self.BlockedError

    def arrive(self, barrier, count):
        self.phases[barrier] += count

    def issue(self, steps, draw, begin, end):
        """The groups in the order in which they issue products; it ends where none can go on."""
        groups = len(self.phases)
        done, inside, order = [0] * groups, [False] * groups, []
        stuck = set()
        while len(stuck) < groups:
            group = draw.choice([group for group in range(groups) if group not in stuck])
            if done[group] == steps:
                stuck.add(group)
            elif inside[group]:
                end(self.rings, self.form, group)
                inside[group], stuck = False, set()
                done[group] += 1
            else:
                try:
                    begin(self.rings, done[group], self.form, group)
                except self.BlockedError:
                    stuck.add(group)
                    continue
                assert not any(inside)
                inside[group], stuck = True, set()
                order.append(group)
        return order


@needs_triton
def test_groups_issue_products_one_after_the_other_whatever_their_pace(monkeypatch):
    def check(begin, end):
        for groups in (2, 3):
            for seed in range(20):
                turns = Turns(groups)
                monkeypatch.setattr(consume, "mbarrier", turns)
                order = turns.issue(9, random.Random(seed), begin, end)
                assert order == [*range(groups)] * 9

    begin, end = consume._await_turn.fn, consume._end_turn.fn
    check(begin, end)

    def begin_too_early(rings, j, form, group):
        begin(rings, j + 1, form, group)

    def all_begin(rings, j, _, group):
        turns = consume.mbarrier
        turns.wait(rings.turns.index(group), j & 1)

    def end_own(rings, _, group):
        consume.mbarrier.arrive(rings.turns.index(group), count=1)

    for broken in ((begin_too_early, end), (all_begin, end), (begin, end_own)):
        with pytest.raises(AssertionError):
            check(*broken)


@needs_triton
def test_groups_take_turns_only_where_an_item_starts_before_the_last_has_ended():
    """A group that waits for its last product has no turn to give."""
    shapes = {**hopper_prefill.SHAPES, **hopper_prefill.THREE_GROUPS}.values()
    assert all(shape.buffers == 2 for shape in shapes if shape.turns)


@needs_triton
@pytest.mark.parametrize("changes", [{}, {"window": 128}, {"soft_cap": 30.0}])
def test_the_shape_of_items_is_the_same_for_all_batches_only_where_terms_say_so(changes):
    alone = ((500, 500),), ((20, 3000),), ((3000, 3000),), ((2, 2),)
    mixed = ((500, 500), (3000, 9000)), ((4, 4),) * 40

    def shapes(head_dim, *, alike):
        found = set()
        for seqs in (*alone, *mixed):
            case = THREE.with_(seqs=seqs, head_dim=head_dim, num_kv_heads=1, padding=0, **changes)
            inputs = build(case, torch.device("cpu"))
            terms = dataclasses.replace(inputs.terms, batch_invariant=alike)
            chosen = hopper_prefill.choose_shape(
                inputs.query, inputs.cache, inputs.batch, terms, programs=16
            )
            found.add(chosen)
        return found

    for head_dim in (64, 80, 128):
        assert len(shapes(head_dim, alike=True)) == 1
        assert len(shapes(head_dim, alike=False)) == (3 if head_dim == 64 else 2)


@needs_triton
@pytest.mark.parametrize("case", [case for case in SHAPES if "three" in case.name], ids=str)
def test_cases_of_three_groups_have_three_groups_on_a_gpu_of_132_multiprocessors(case):
    inputs = build(case, torch.device("cpu"))
    shape, is_cut = hopper_prefill.choose_shape(
        inputs.query, inputs.cache, inputs.batch, inputs.terms, programs=132
    )
    assert (shape.groups, is_cut) == (3, False)


STEP = (
    ["HGMMA.64x128x16 R24"] * 8
    + ["WARPGROUP.DEPBAR.LE gsb0, 0x1"]
    + ["MUFU.EX2 R1, R1"] * 6
    + ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA 0x10"]
)


@needs_triton
def test_a_step_whose_exponentials_wait_for_the_product_is_refused():
    check_overlap = importlib.import_module("tests.backends.compile_offline").check_overlap
    check_overlap(STEP, products=8)
    late = [*STEP[:9], STEP[15], *STEP[9:15], STEP[16]]
    spilled = [*STEP[:10], "LDL R1, [R1]", *STEP[10:]]
    waited = [*STEP[:4], "WARPGROUP.DEPBAR.LE gsb0, 0x0", *STEP[4:]]
    for broken in (late, spilled, waited):
        with pytest.raises(AssertionError):
            check_overlap(broken, products=8)


@needs_triton
def test_what_the_copy_engine_is_told_is_made_once_for_each_address(monkeypatch):
    made = []
    monkeypatch.setattr(launch, "make_tensordesc_arg", lambda *told: made.append(told) or [*told])
    box = launch.Box((4, 2, 64), (128, 64, 1), (4, 1, 64), hopper_prefill.layout_of(64, 2))
    first, second = torch.zeros(2, 4, 2, 64, dtype=BF16)
    for tensor in (first, second, first, second):
        (boxes, kind) = box.arguments(tensor, "kind")
        assert (boxes.base.data_ptr(), kind) == (tensor.data_ptr(), "kind")
    assert len(made) == 2
    memory = torch.zeros(launch.MOST_KEPT + 600, dtype=BF16)
    for i in range(launch.MOST_KEPT + 50):
        box.arguments(memory[i : i + 512].view(4, 2, 64), "kind")
    assert len(box.kept) <= launch.MOST_KEPT


def launcher_of_triton(signature, kinds, launch_compiled):
    """Triton's own launcher, as its constructor leaves it, around a stand-in for the driver's."""
    made = object.__new__(driver.CudaLauncher)
    made.num_ctas, made.launch_cooperative_grid, made.launch_pdl = 1, False, True
    made.global_scratch_size = made.profile_scratch_size = 0
    made.global_scratch_align = made.profile_scratch_align = 1
    made.arg_annotations, made.kernel_signature = ["annotations"], b"signature"  # 3.7
    made.launch = driver.wrap_handle_tensordesc(launch_compiled, signature, kinds)
    return made


@needs_triton
@pytest.mark.parametrize("num_boxes", [0, 1, 2])
def test_the_short_way_to_launch_passes_what_the_installed_triton_does(monkeypatch, num_boxes):
    """Both ways are called; fails for a Triton whose launcher is not known, where it is dead."""
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda box, kind: [("made", box, kind), 64])
    calls = []
    boxes = [f"box {index}" for index in range(num_boxes)]
    kinds = [f"kind {index}" for index in range(num_boxes)]
    signature = dict(enumerate([*["tensordesc<bf16[4,64]>"] * num_boxes, "*bf16", "i32"]))
    run = launcher_of_triton(signature, kinds, partial(lambda *given: calls.append(given)))
    kernel = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    run(3, 2, 1, 77, 5, (4, 1, 0), None, None, None, *boxes, 4096, 12)
    short = launch.shorten(kernel)
    assert short.kinds == tuple(kinds)
    made = [part for pair in zip(boxes, kinds, strict=True) for part in [("made", *pair), 64]]
    short.run((3, 2, 1), 77, (*made, 4096, 12))
    as_lists = [[list(a) if isinstance(a, tuple | list) else a for a in each] for each in calls]
    assert as_lists[0] == as_lists[1]


@needs_triton
def test_the_long_way_to_launch_is_taken_with_scratch_memory_or_an_unknown_triton(monkeypatch):
    run = launcher_of_triton({0: "i32"}, [], torch.empty)
    kernel = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    assert launch.shorten(kernel) is not None
    run.global_scratch_size = 16
    assert launch.shorten(kernel) is None
    run.global_scratch_size = 0
    monkeypatch.setattr(launch, "_minor", "4.0")
    assert launch.shorten(kernel) is None


@needs_triton
@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"head_dim": 32}, False),
        ({"head_dim": 84}, False),
        ({"head_dim": 256}, True),
        ({"block_size": 4}, False),
        ({"block_size": 24}, False),
        ({"strided": True}, True),
        ({"scale": -0.1}, False),
        ({"scale": 0.0}, False),
        ({"soft_cap": 50.0}, True),
        ({"soft_cap": 1000.0}, False),
        ({"shift": True}, False),
    ],
)
def test_what_hopper_cannot_serve_goes_to_the_portable_kernel(monkeypatch, changes, served):
    scale, shift = changes.pop("scale", 0.1), changes.pop("shift", False)
    inputs = build(MIXED.with_(**changes), torch.device("cpu"))
    query = inputs.query
    if shift:  # by two bytes
        query = torch.empty(query.numel() + 1, dtype=BF16)[1:].view(query.shape)
    monkeypatch.setattr(place_module, "_gpu", lambda _: gpus.H100)
    place = gpus.backend_apart()._place
    terms = dataclasses.replace(inputs.terms, scale=scale)
    arguments = (query, inputs.cache, inputs.out, terms)
    assert hopper_prefill.can_attend(place, *arguments) == served
    assert not hopper_prefill.can_attend(Place(interpreting=True), *arguments)


WIDE = MIXED.with_(dtype=torch.float32)  # prefill takes single tokens too
LATENTS = MIXED.with_(num_kv_heads=1, group=16, head_dim=576, value_dim=512)


@needs_triton
@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("case", [MIXED, WIDE, LATENTS], ids=["heads", "float32", "latents"])
def test_where_the_heads_of_a_query_are_asks_for_no_kernel_of_its_own(case, on_hopper, monkeypatch):
    gpu = gpus.H100 if on_hopper else gpus.H100._replace(capability=(8, 0))
    monkeypatch.setattr(place_module, "_gpu", lambda _: gpu)
    warm_up = importlib.import_module("backends.triton_gpu.warm_up")
    place = gpus.backend_apart()._place

    def variants(seqs, lay):
        inputs = build(case.with_(seqs=seqs, padding=0), torch.device("cpu"))
        plan = warm_up.plan_attention(
            place, lay(inputs.query), inputs.cache, inputs.batch, inputs.out, inputs.terms
        )
        return set(warm_up._variants((plan,)))

    def heads_first(query):
        return query.transpose(0, 1).contiguous().transpose(0, 1)

    def with_a_stride(length):  # from token to token, of which there is one
        return lambda query: query.as_strided(query.shape, (length, *query.stride()[1:]))

    for seqs in (((1, 700),), ((1, 30), (1, 9)), ((40, 700),), ((9, 30), (130, 900))):
        wanted = variants(seqs, lambda query: query)
        assert wanted
        assert variants(seqs, heads_first) == wanted
        if seqs == ((1, 700),):
            for length in (8, 1 << 20):
                assert variants(seqs, with_a_stride(length)) == wanted


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_prefill_is_right_for_every_shape_and_feature(triton, case):
    for finding in check_attention(triton, case):
        assert finding.passed, finding


@pytest.mark.gpu
@needs_cuda
def test_three_groups_give_the_same_rows_alone_in_a_batch_and_in_other_blocks(triton):
    seqs = ((9, 9), (40, 133), (150, 150), (70, 200))
    base = THREE.with_(name="three groups", seqs=seqs, padding=0)
    for finding in check_relations(triton, base):
        assert finding.passed, finding


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_prefill_agrees_with_numba(triton):
    numba = backends.get_backend("numba")

    @given(attention_cases((BF16, torch.float16), longest=300, most_seqs=4, head_dims=(64, 80)))
    @settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
    def agree(case):
        here, there = build(case, triton.device), build(case, torch.device("cpu"))
        live = int(there.batch.query_start_loc[-1])
        allowed = there.expected().allowed[:live]
        ours, theirs = here.run(triton)[:live].cpu(), there.run(numba)[:live]
        assert ((ours.double() - theirs.double()).norm(dim=-1) <= 2 * allowed).all()

    agree()


@pytest.mark.gpu
@needs_cuda
def test_a_graph_of_prefill_follows_other_lengths_and_tables_when_it_is_replayed(triton):
    shape = MIXED.with_(name="captured", seqs=((150, 700), (60, 500), (40, 40)), group=4)
    captured = build(shape, triton.device)
    captured.run(triton)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(triton)
    later = build(shape.with_(seqs=((20, 650), (150, 300), (80, 81)), seed=5), triton.device)
    blocks = min(captured.cache.k.shape[0], later.cache.k.shape[0])
    rows = slice(0, int(later.batch.query_start_loc[-1]))
    captured.query[rows] = later.query[rows]
    for tensor, content in zip(captured.cache.tensors, later.cache.tensors, strict=True):
        tensor[:blocks] = content[:blocks]
    captured.batch.query_start_loc.copy_(later.batch.query_start_loc)
    captured.batch.seq_lens.copy_(later.batch.seq_lens)
    width = min(captured.batch.block_table.shape[1], later.batch.block_table.shape[1])
    captured.batch.block_table[:, :width] = later.batch.block_table[:, :width]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(captured.out[rows]), bits(later.run(triton)[rows]))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer here")
def test_the_sanitizer_finds_nothing_in_hoppers_kernels_but_what_it_cannot_follow():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    command = [sys.executable, "-m", "tests.backends.sanitize_hopper"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("memcheck finds nothing, racecheck what it cannot follow alone\n")


@pytest.mark.gpu
@needs_cuda
def test_a_thread_can_attend_that_has_called_nothing_of_cuda_before(triton):
    """Its first call is a launch that needs a tensor described, of a kernel that is loaded."""
    alone = MIXED.with_(group=4, head_dim=128, seqs=((300, 300),), padding=0)
    inputs = build(alone, triton.device)
    wanted = inputs.run(triton)
    out = torch.empty_like(wanted)
    other = backends.KVCache(*(tensor.clone() for tensor in inputs.cache.tensors))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        attend = partial(triton.paged_attention, inputs.query, other, inputs.batch, inputs.terms)
        thread.submit(attend, out=out).result()
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(wanted))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("base", [CUT, THREE], ids=["cut", "three groups"])
def test_a_recorded_step_serves_any_mix_of_decode_and_prefill_up_to_its_bounds(triton, base):
    """Four sequences, 300 tokens and 5000 positions at most, whatever they were when recorded."""
    shape = base.with_(seqs=((1, 4900), (297, 4900), (1, 700), (1, 1)))
    widest = build(shape, triton.device)
    held = backends.PagedBatch(
        widest.batch.query_start_loc, widest.batch.seq_lens, widest.batch.block_table,
        torch.full((300,), -1, dtype=torch.int64, device=triton.device), 300, 4900,
    )  # fmt: skip
    query = widest.query[:300]
    held_cache = backends.KVCache(*(tensor.clone() for tensor in widest.cache.tensors))
    out = torch.empty_like(query)

    def attend():
        triton.paged_attention(query, held_cache, held, widest.terms, out=out)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    mixes = (
        ((1, 4900), (1, 30), (1, 700), (1, 1)), ((300, 2000), (0, 0), (0, 0), (0, 0)),
        ((17, 4900), (1, 100), (0, 0), (0, 0)), ((4, 900), (128, 4000), (100, 100), (2, 2)),
        ((0, 0), (0, 0), (0, 0), (0, 0)), ((1, 4900), (40, 4900), (3, 300), (0, 0)),
    )  # fmt: skip
    for seed, seqs in enumerate(mixes):
        mix = build(shape.with_(seqs=seqs, seed=seed, padding=0), triton.device, layout=seed)
        live = int(mix.batch.query_start_loc[-1])
        query[:live] = mix.query[:live]
        for tensor, content in zip(held_cache.tensors, mix.cache.tensors, strict=True):
            assert len(content) <= len(tensor)
            tensor[: len(content)] = content
        held.query_start_loc.copy_(mix.batch.query_start_loc)
        held.seq_lens.copy_(mix.batch.seq_lens)
        width = min(held.block_table.shape[1], mix.batch.block_table.shape[1])
        held.block_table[:, :width] = mix.batch.block_table[:, :width]
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = mix.expected()
        assert live == 0 or expected.worst_ratio(out[:live]) <= 1
        assert out[live:].isnan().all()


@pytest.mark.gpu
@needs_cuda
def test_pieces_are_added_up_in_every_replay_whatever_runs_beside(triton):
    recorded = []
    for seqs in (((40, 5000),), ((40, 2100), (17, 1500))):
        inputs = build(CUT.with_(name="captured", seqs=seqs), triton.device)
        wanted = bits(inputs.run(triton)).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step = dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch, kept={}))
            for _ in range(3):
                step.run(triton)
        recorded.append((torch.cuda.Stream(), graph, inputs, wanted))
    for _ in range(30):
        for stream, graph, *_ in recorded:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, inputs, wanted in recorded:
        assert torch.equal(bits(inputs.out), wanted)
