"""What adapters add beside float64, in Triton's interpreter or on a GPU.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
"""

import itertools
import sys

import torch
from torch.nn import functional

from model.attention.attention import IMPLEMENTATION
from model.compile import lora_kernels, traced_network
from model.compile.joined_products import Expands
from model.compile.lora_kernels import (
    attend_rotated,
    expand,
    expand_normed,
    expand_parts,
    fits,
)
from model.compile.piecewise import compile_piecewise
from model.compile.traced_network import Mixing, trace_network
from model.forward import lora
from model.forward.lora import Adapters
from tests.model.networks import build

SHAPES = (  # rank, slots, sizes of parts, rows, the most columns at once
    (8, 8, (64, 32, 32), 5, 128),
    (16, 8, (48,), 70, 128),
    (64, 3, (32, 32), 67, 128),
    (12, 9, (16, 48, 16, 32), 130, 64),
    (64, 9, (96, 96), 1, 64),
    (3, 2, (33,), 2, 128),
    (16, 4, (32, 32), 400, 128),
)


def wanted(product, inner, up, slots, rank, sizes, *, is_gated):
    """What `expand` gives, from operators."""
    columns = len(up)
    own = slots[:, None] == torch.arange(columns) // rank
    out, start = product.clone(), 0
    for part, size in enumerate(sizes):
        chosen = inner[..., part * columns : (part + 1) * columns].masked_fill(~own, 0)
        out[..., start : start + size] += chosen @ up[:, start : start + size]
        start += size
    if is_gated:
        gate, value = out.chunk(2, -1)
        return functional.silu(gate) * value
    return out


def check(device, dtypes, run=expand):
    """Compare kinds of adapters and rows; how many there were.

    Raises:
        AssertionError: they differ, or a row depends on the others.
    """
    torch.manual_seed(0)
    count = 0
    for dtype, (rank, num_slots, sizes, rows, at_once) in itertools.product(dtypes, SHAPES):
        columns = rank * num_slots
        assert fits(sizes)
        wide = (torch.randn(1, rows, 5 + sum(sizes)) * 3).to(dtype)
        halves = torch.randn(1, rows, len(sizes) * columns + 3).to(dtype)
        up = (torch.randn(columns, sum(sizes)) / rank**0.5).to(dtype)
        slots = torch.randint(-1, num_slots, (rows,))
        halves[:, slots < 0] = float("nan")  # of a row without an adapter nothing is read
        for is_gated in (False, True)[: 1 + (len({*sizes}) == 1 and len(sizes) == 2)]:
            given = [wide[..., 5:], halves[..., :-3], up, slots]
            double = [one.double() for one in given[:3]]
            exact = wanted(*double, slots, rank, sizes, is_gated=is_gated)
            product, inner, *sent = [one.to(device) for one in (wide, halves, up, slots)]
            sent = [product[..., 5:], inner[..., :-3], *sent]
            how = {"is_gated": is_gated, "at_once": at_once}
            got = run(*sent, rank, sizes, **how)
            error = (got.cpu().double() - exact).norm() / exact.norm()
            assert error < max(1e-6, torch.finfo(dtype).eps), f"{rank} {sizes} {rows}: {error}"
            one = [sent[0][:, -1:], sent[1][:, -1:], sent[2], sent[3][-1:]]
            assert torch.equal(run(*one, rank, sizes, **how), got[:, -1:])
            count += 1
    return count


def of_all_slots(product, inner, up, slots, rank, sizes, **how):
    """Planted: each row gets the first adapter's product."""
    return expand(product, inner, up, slots * 0, rank, sizes, **how)


def check_network(architecture, expands, device, dtype=torch.float32, counts=(7, 4)):
    """Pieces call what adds adapters once for each product, and give what the network gives."""
    torch._dynamo.reset()
    network = build(architecture, 3).network.to(device, dtype)
    network.set_attn_implementation(IMPLEMENTATION)
    adapters = Adapters(network, 2, 4, None, {})
    once = torch._dynamo.config.patch(error_on_recompile=True)  # no piece serves two shapes
    with adapters.filled(), once:
        traced = trace_network(network, device, adapters)
        pieces = compile_piecewise(traced, "eager", behind=adapters.downs, expands=expands)
        plain = compile_piecewise(trace_network(network, device), "eager")
        for count in counts:
            ids = torch.arange(count, device=device)[None] * 7 % 320
            last, slots = ids[0, :3] * 0 + count - 1, (count - torch.arange(count)) % 3 - 1
            given = ids, ids * 3 % 37, last, Mixing(), None, slots.to(device)
            with torch.no_grad():
                got, exact = pieces.logits(*given).float(), traced.logits(*given).float()
                error = (got - exact).norm() / exact.norm()
                assert error < 8 * torch.finfo(dtype).eps, f"{architecture}, {count}: {error}"
                apart = (plain.logits(*given[:4]).float() - exact).norm() / exact.norm()
                assert apart > 2 * error, f"{architecture}, {count}: {error}, without {apart}"
        planted = Expands(of_the_parts_turned, *expands[1:])
        broken = compile_piecewise(traced, "eager", behind=adapters.downs, expands=planted)
        with torch.no_grad():
            apart = (broken.logits(*given).float() - exact).norm() / exact.norm()
        assert apart > 2 * error, "found nothing of what was planted"
    nodes = pieces.module.graph.nodes
    called = [node.target.__name__ for node in nodes if node.target in expands[:3]]
    kinds = ", ".join(f"{called.count(kind)} {kind}" for kind in sorted({*called}))
    gated = [node for node in nodes if "is_gated" in node.kwargs]
    every = [*network.parameters(), *adapters.downs, *[h.up for h in adapters._halves.values()]]
    places = [one.untyped_storage() for one in (*pieces.module.parameters(), *every)]
    held = {place.data_ptr(): place.nbytes() for place in places}
    assert sum(held.values()) == sum(one.nbytes for one in every), "a weight is stored twice"
    return f"{architecture}: {kinds}, {len(gated)} gated\n"


def of_the_parts_turned(product, start, inner, inner_start, up, slots, rank, sizes, **how):
    """Planted: the second half of another part."""
    return expand_parts(
        product, start, inner, inner_start, up.flip(1).contiguous(), slots, rank, sizes, **how
    )


def main():
    assert not fits((64, 24)), "a tile would have columns of two parts"
    sys.stdout.write(f"{check('cpu', (torch.float32, torch.float16))} kinds\n")
    try:
        check("cpu", (torch.float32,), of_all_slots)
    except AssertionError:
        sys.stdout.write("found what was planted\n")
    lora._expand = torch.ops.kvcore_lora.expand
    cpu, others = torch.device("cpu"), (expand_normed, attend_rotated, fits)
    traced_network._TRIALS = ((3, 2),)  # it is slow
    lora_kernels._FEW = 4  # of the steps below one has more rows
    for architecture in ("qwen3", "qwen2"):
        sys.stdout.write(check_network(architecture, Expands(expand_parts, *others), cpu))


if __name__ == "__main__":
    main()
