"""After a warm-up no call needs a variant that has not been met: random batches; by test_triton.

In Triton's interpreter, which counts variants and compiles nothing. What only a Hopper GPU launches
is planned as on one of 132 multiprocessors, and not launched.
"""

import random
import sys

import torch

import backends
from backends import IndexCall, LayerCall
from backends.conformance import AttentionCase
from backends.conformance.cases import bits, build
from backends.conformance.sparse import SparseCase, build_sparse
from backends.triton_gpu import copy_blocks, slot_mapping, store_kv, warm_up
from backends.triton_gpu.decode import cascade, decode, merge
from backends.triton_gpu.latent import latent
from backends.triton_gpu.prefill import prefill
from backends.triton_gpu.shared.place import Place
from backends.triton_gpu.sparse import attend_chosen, choose_tokens, score_index
from backends.triton_gpu.sparse.choose_tokens import level_widths
from backends.triton_gpu.warm_up import batch_sizes, variants_asked
from tests.backends.gpus import H100

MAX_NUM_SEQS, MAX_QUERY_LEN = 40, 6
TRITON = backends.get_backend("triton")
CPU = torch.device("cpu")
CASE = AttentionCase("", (), num_kv_heads=1, group=2, head_dim=16, dtype=torch.float16)
LATENTS = CASE.with_(head_dim=24, value_dim=16, group=5, seqs=((1, 20), (2, 30)))
LENGTHS = (2, 3, 4, 5, 6, 7, 11, 16, 17, 33, 64, 100, 128, 129, 400, 735, 864, 1100, 1600, 2048)


class OnHopper(Place):
    """Plans as on a GPU; launches nothing."""

    def gpu(self, device):
        return H100


def compiled():
    """Every variant of our kernels but Hopper's that this process has used so far."""
    launchers = (
        cascade._attend_prefix, copy_blocks._copy, decode._attend_chunk, latent._attend_part,
        latent._attend_tile, merge._merge_parts, prefill._attend, slot_mapping._fill,
        store_kv._scatter,
    )  # fmt: skip
    return frozenset((i, key) for i, each in enumerate(launchers) for key in each.compiled())


def layer_of(inputs):
    return LayerCall(
        inputs.query.shape[1], inputs.query.dtype, inputs.cache, inputs.terms, shared_prefix=True
    )


def random_case(draw):
    count = draw.choice((1, 2, 15, 16, 17, 40))
    shared = 32 * draw.randint(0, 1)
    most = draw.choice((1, 1, 4)) if not shared else 1
    seqs = tuple((draw.randint(1, most), draw.randint(shared + 5, 50)) for _ in range(count))
    if count < 3:
        seqs += ((draw.randint(1, MAX_QUERY_LEN), 42),)
    return CASE.with_(seqs=seqs, shared=shared)


def check_latents():
    inputs = build(LATENTS, torch.device("cpu"))
    TRITON.warmup([layer_of(inputs)], max_num_seqs=20, max_query_len=MAX_QUERY_LEN)
    known = compiled()
    for count, query_len in ((17, 4), (17, 1), (3, 3), (1, 6), (20, 2)):
        seqs = tuple((query_len, 20) for _ in range(count))
        build(LATENTS.with_(seqs=seqs), torch.device("cpu")).run(TRITON)
        assert compiled() == known, (count, query_len, compiled() - known)


def check_sparse():
    case = SparseCase(LATENTS.with_(seqs=((1, 20), (2, 30))), count=5)
    inputs = build_sparse(case, torch.device("cpu"))
    one, index = inputs.attention, IndexCall(case.num_heads, inputs.cache)
    layer = LayerCall(5, torch.float16, one.cache, one.terms, num_chosen=5, index=index)
    launchers = (attend_chosen._locate, choose_tokens._choose, score_index._score)
    TRITON.warmup([layer], max_num_seqs=20, max_query_len=2)
    known = compiled(), [each.compiled() for each in launchers]
    for seqs in (((1, 20),), ((2, 40), (1, 1500)), ((2, 9),) * 17):
        step = build_sparse(case.with_(seqs=seqs), torch.device("cpu"))
        scores = step.score(TRITON)
        step.attend(TRITON, step.choose(TRITON, scores, 5))
        assert (compiled(), [each.compiled() for each in launchers]) == known, seqs
    for count in (1, 5, 700, 2048, 8192):
        met, batch = set(), warm_up._idle(CPU, 1, 1, 1)
        widths = (1, 1100, 4097, 9000, 17000, 70000, 130000, 300000, 1 << 20)
        for place in (level_widths(count), widths):
            asked = set()
            for width in place:
                out = torch.empty((1, count), dtype=torch.int32)
                scores = torch.empty((1, width))
                plan = choose_tokens.plan_choose(TRITON._place, scores, batch, 0, out)
                asked |= {launch.variant for launch in plan.levels}
            assert not met or asked <= met, count
            met |= asked


def unmet(place, case, max_num_seqs, max_query_len):
    """Batches on a Hopper GPU that ask for a variant which the warm-up does not."""
    inputs = build(case, torch.device("cpu"))
    layer, terms = layer_of(inputs), inputs.terms
    met = set()
    for batch in warm_up._batches(place, layer, max_num_seqs, max_query_len):
        met |= variants_asked(place, layer, batch, terms)
    for num_seqs in (n for n in (1, 2, 5, 16, 17, 60) if n <= max_num_seqs):
        for query_len in (n for n in LENGTHS if n <= max_query_len):
            for rows in {query_len, num_seqs * query_len}:
                for length in (query_len, 1500, 4096):
                    batch = warm_up._idle(inputs.query.device, num_seqs, rows, query_len, length)
                    if not variants_asked(place, layer, batch, terms) <= met:
                        yield num_seqs, query_len, rows, length


def check_hopper():
    place, base = OnHopper(interpreting=True), CASE.with_(dtype=torch.bfloat16, seqs=((1, 9),))
    cases = [
        base.with_(num_kv_heads=kv, group=heads // kv, head_dim=size)
        for heads, kv, size in (
            (32, 8, 128),
            (8, 1, 128),
            (8, 2, 128),
            (4, 1, 256),
            (3, 1, 64),
            (64, 8, 64),
        )
    ]
    cases.append(base.with_(group=16, head_dim=576, value_dim=512))
    for case in cases:
        for bounds in ((60, 2048), (60, 6), (1, 700)):
            found = list(unmet(place, case, *bounds))
            assert not found, (case, bounds, found)
    for heads, kv, size, *bounds in ((16, 2, 64, 16, 64), (20, 4, 64, 8, 64), (14, 2, 48, 60, 200)):
        case = base.with_(num_kv_heads=kv, group=heads // kv, head_dim=size)
        found = list(unmet(place, case, *bounds))
        assert not found, (case, bounds, found)
    all_batches = warm_up._batches
    for case, most in ((cases[1], 8), (cases[-1], 2), (cases[-2], 200)):

        def gap(*call, most=most):  # the check finds what a warm-up leaves out
            for batch in all_batches(*call):
                if batch.max_query_len <= most:
                    yield batch

        warm_up._batches = gap
        assert list(unmet(place, case, 60, 2048))
    warm_up._batches = all_batches


def main():
    assert batch_sizes(1) == [1]
    assert batch_sizes(40) == [1, 2, 16, 17, 40]
    assert batch_sizes(5000) == [1, 2, 16, 17, 64, 65, 256, 257, 1024, 1025]
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    inputs = build(CASE.with_(seqs=((1, 20), (2, 30))), torch.device("cpu"))
    before = [bits(tensor) for tensor in inputs.cache.tensors]
    TRITON.warmup([layer_of(inputs)], max_num_seqs=MAX_NUM_SEQS, max_query_len=MAX_QUERY_LEN)
    for tensor, then in zip(inputs.cache.tensors, before, strict=True):
        assert torch.equal(bits(tensor), then)
    known = compiled()
    draw = random.Random(1)
    for _ in range(6):
        step = build(random_case(draw), torch.device("cpu"))
        step.run(TRITON)
        rows = torch.zeros(3, 1, 16, dtype=torch.float16)
        slots = torch.tensor([1, -1, 9])
        TRITON.store_kv(rows, rows, step.cache, slots)
        TRITON.compute_slot_mapping(
            step.batch.query_start_loc, step.batch.seq_lens, step.batch.block_table, 16,
            torch.empty(step.query.shape[0], dtype=torch.int64),
        )  # fmt: skip
        TRITON.copy_blocks(step.cache.tensors, torch.tensor([[1, 2]]))
        assert compiled() == known, compiled() - known
    build(CASE.with_(seqs=((1, 50), (3, 42)), shared=32), torch.device("cpu")).run(TRITON)
    assert compiled() == known, compiled() - known
    step = build(CASE.with_(seqs=((1, 9),), window=5), torch.device("cpu"))
    step.run(TRITON)
    assert compiled() > known  # a window that the warm-up was not told of
    check_latents()
    check_sparse()
    check_hopper()
    sys.stdout.write("nothing is left to compile\n")


if __name__ == "__main__":
    main()
