"""The online softmax of the attention kernels, their masks, and entries of the block table.

    highest' = max(highest, max_k logit_k);  rescale = 2^(highest - highest')
    total' = total * rescale + sum_k 2^(logit_k - highest')

`highest` and `total` are the running maximum and sum of each row. Logits are in base 2
(`soft_cap`). A weighted sum that is kept beside the total is multiplied by `rescale` too. `highest`
starts at -1e30 instead of -inf, because -inf minus itself is NaN. The functions work on tensors of
Triton and of Gluon, whatever their layout.
"""

import triton.language as tl

from backends.triton_gpu.shared.place import device_function
from backends.triton_gpu.shared.soft_cap import LOG2E


@device_function
def raise_highest(highest: tl.tensor, logit: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(the larger of both, the factor for sums that were weighted relative to `highest`)."""
    now = tl.maximum(highest, logit)
    return now, tl.exp2(highest - now)


@device_function
def add_tile(
    logits: tl.tensor, highest: tl.tensor, total: tl.tensor, AXIS: tl.constexpr,
    factor: tl.tensor | None = None,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(weights of a tile, highest, total, rescale); keys lie along AXIS.

    A total of as many dimensions as the logits is kept for each key of a tile, to be summed at the
    end. With a `factor`, one number or one a row and above 0, the logits are multiplied by it.
    """
    top, scaled = tl.max(logits, AXIS), logits
    if factor is not None:
        top = top * factor
        if factor.type.is_block():
            factor = tl.expand_dims(factor, AXIS)
        scaled = logits * factor
    now, rescale = raise_highest(highest, top)
    weights = tl.exp2(scaled - tl.expand_dims(now, AXIS))
    if len(total.shape) == len(logits.shape):
        total = total * tl.expand_dims(rescale, AXIS) + weights
    else:
        total = total * rescale + tl.sum(weights, AXIS)
    return weights, now, total, rescale


@device_function
def load_sinks(sinks: tl.tensor, head: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The sinks of these heads as logits in base 2; -inf outside of the mask."""
    return tl.load(sinks + head, mask=mask, other=float("-inf")).to(tl.float32) * LOG2E


@device_function
def add_sink(
    sink: tl.tensor, highest: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(highest, total, rescale) with one more logit a row, which has no value."""
    now, rescale = raise_highest(highest, sink)
    return now, total * rescale + tl.exp2(sink - now), rescale


@device_function
def is_visible(
    key: tl.tensor, last: tl.tensor, window: tl.tensor, HAS_WINDOW: tl.constexpr
) -> tl.tensor:
    """Return True if a row sees a key: it sees those up to `last`, or only `window` of them."""
    visible = key <= last
    if HAS_WINDOW:
        visible = visible & (key > last - window)
    return visible


@device_function
def is_within(
    key: tl.tensor, begin: tl.tensor, end: tl.tensor, HAS_BEGIN: tl.constexpr
) -> tl.tensor:
    """Return True if a key is in begin .. end - 1; no HAS_BEGIN: none comes before `begin`."""
    live = key < end
    if HAS_BEGIN:
        live = live & (key >= begin)
    return live


@device_function
def load_entries(
    table: tl.tensor, key: tl.tensor, begin: tl.tensor, end: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HAS_BEGIN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The blocks of keys; block 0 for keys outside of begin .. end - 1."""
    live = is_within(key, begin, end, HAS_BEGIN)
    return tl.load(table + key.to(tl.uint32) // BLOCK_SIZE, mask=live, other=0)
