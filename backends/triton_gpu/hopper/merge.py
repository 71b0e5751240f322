"""The merge of Hopper's prefill: it adds the pieces of cut items up once all programs are done.

    out[h] = sum_c 2^(lse_c - top) part_c / sum_c 2^(lse_c - top),  top = max_c lse_c

Programs meet at a barrier in global memory: the launch is cooperative, so that all of them run, and
none waits before it is done with its pieces. Then the program that had piece p of an item adds up
the p-th share of the item's rows, in the order of the pieces. The counter is one number that keeps
what it has: a program's groups add 1, the first one what makes all of them together 2^31, and wait
until the sign has changed.
"""

from triton.experimental.gluon import language as gl

from backends.triton_gpu.hopper.items import find_rows, gluon_function, read_item
from backends.triton_gpu.prefill.order import COUNTER
from backends.triton_gpu.shared.softmax import add_tile

_meet = getattr(gl, "barrier", None) or gl.thread_barrier  # as Triton 3.7 and 3.6 call it
FEW, MANY = gl.constexpr(4), gl.constexpr(16)
"""Pieces and rows that are added up together: few of the one, many of the other."""


@gluon_function
def _await_all(counter: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr) -> None:
    """Return when this group of every program has come here, and what they wrote can be read."""
    arrivals = gl.num_programs(0) * FORM.shape.groups
    step = arrivals * 0 + 1
    if GROUP_ID == 0:
        step = gl.where(gl.program_id(0) == 0, (2147483647 - arrivals) + 2, step)
    _meet()
    before = gl.atomic_add(counter, step, sem="acq_rel", scope="gpu")
    now = before
    while (now ^ before) >= 0:
        now = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    _meet()


@gluon_function
def merge_items(
    given: gl.tensor, work: gl.tensor, FORM: gl.constexpr, GROUP_ID: gl.constexpr
) -> None:
    """A group's share of the rows of this program's items, once all pieces are there."""
    PACK: gl.constexpr = FORM.pack
    GROUPS: gl.constexpr = FORM.shape.groups
    item = read_item(work.items * 0, work, given, FORM)
    _await_all(given.work + COUNTER, FORM, GROUP_ID)
    for n in range(work.items):
        ahead = read_item(n + 1, work, given, FORM)
        if item.pieces > 1:
            share, shares = item.piece * GROUPS + GROUP_ID, item.pieces * GROUPS
            begin = item.tokens * PACK * share // shares
            end = item.tokens * PACK * (share + 1) // shares
            if item.pieces > FEW:
                _merge_rows(given, item, begin, end, MANY, FEW, FORM)
            else:
                _merge_rows(given, item, begin, end, FEW, MANY, FORM)
        item = ahead


@gluon_function
def _merge_rows(
    given: gl.tensor, item: gl.tensor, begin: gl.tensor, end: gl.tensor,
    STEP: gl.constexpr, ROWS: gl.constexpr, FORM: gl.constexpr,
) -> None:  # fmt: skip
    """Add up the rows begin .. end - 1 of an item, ROWS of STEP pieces at a time."""
    SLICES: gl.constexpr = FORM.slices
    HEAD_DIM: gl.constexpr = FORM.head_dim
    WIDTH: gl.constexpr = 64 if HEAD_DIM <= 64 else 128 if HEAD_DIM <= 128 else 256
    WIDE: gl.constexpr = gl.BlockedLayout(
        [STEP, 1, WIDTH // 32 if WIDTH < 128 else 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]
    )
    FLAT: gl.constexpr = gl.SliceLayout(2, WIDE)
    SUMS: gl.constexpr = gl.SliceLayout(0, WIDE)
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    lses = given.partial + given.most_items * (FORM.shape.rows * HEAD_DIM)
    first = item.number - item.piece * SLICES
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))[None, None, :]
    for base in range(begin, end, ROWS):
        r = base + gl.arange(0, ROWS, gl.SliceLayout(0, FLAT))
        highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(0, FLAT))
        total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, FLAT))
        sums = gl.full([ROWS, WIDTH], 0.0, gl.float32, SUMS)
        for least in range(0, item.pieces, STEP):
            index = least + gl.arange(0, STEP, gl.SliceLayout(1, FLAT))
            entry = (first + index * SLICES)[:, None] * FORM.shape.rows + r[None, :]
            there = (index < item.pieces)[:, None] & (r < end)[None, :]
            at = given.partial + entry[:, :, None].to(gl.int64) * HEAD_DIM + dim
            parts = gl.load(at, mask=there[:, :, None] & (dim < HEAD_DIM), other=0.0)
            lse = gl.load(lses + entry, mask=there, other=float("-inf"))
            weight, highest, total, rescale = add_tile(lse, highest, total, 0)
            sums = sums * gl.convert_layout(rescale, ROW)[:, None]
            sums += gl.sum(parts * weight[:, :, None], 0)
        live = r < end
        share = gl.convert_layout(1.0 / gl.where(live, total, 1.0), ROW)
        r = base + gl.arange(0, ROWS, ROW)
        across = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        token, head, there = find_rows(r, item, FORM)
        to = (item.row + token).to(gl.int64) * FORM.token_stride + head * FORM.head_stride
        mask = ((r < end) & there)[:, None] & (across < HEAD_DIM)[None, :]
        result = (sums * share[:, None]).to(given.out.dtype.element_ty)
        gl.store(given.out + to[:, None] + across[None, :], result, mask=mask)
