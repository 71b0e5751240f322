"""Operations on recurrent states at the sizes of published models: one token of each sequence.

States are replaced in place, as in decoding, among twice as many slots in a random order. Counted
are the bytes that have to move: each state read and written once, rows and weights read once, the
result written once. Beside an operation stands an elementwise copy that moves as many bytes.
`prefill` computes one prompt's chunk with the operation, token after token, and with the chunked
kernels of flash-linear-attention where they are installed.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backends import DecayGate, LinearAttentionTerms, ShortConvTerms, StateBackend, StateBatch
from tests.bench.kernels.cases import Row
from tests.bench.kernels.graphs import against, buffer_sets, time_graph
from tests.bench.kernels.moves import COPY, copy_us

BATCH = 64
_PROMPTS = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class StateCase:
    """A layer of a published model.

    Attributes:
        model: its name.
        kind: "conv", "delta", "KDA" or "mamba".
        heads: of values, and those of keys; of a convolution its channels and its width.
        dims: of a key and of a value; of a convolution: nothing.
    """

    model: str
    kind: str
    heads: tuple[int, int]
    dims: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a state."""
        channels, width = self.heads
        return (width - 1, channels) if self.kind == "conv" else (self.heads[0], *self.dims)


CASES = (
    StateCase("Qwen3.5-4B, Qwen3-Next", "conv", (8192, 4)),
    StateCase("Kimi-Linear", "conv", (4096, 4)),
    StateCase("Nemotron-H", "conv", (10240, 4)),
    StateCase("Qwen3.5-4B, Qwen3-Next", "delta", (32, 16)),
    StateCase("Kimi-Linear", "KDA", (32, 32)),
    StateCase("Nemotron-H", "mamba", (128, 8), (128, 64)),
)


def bench_states(
    backend: StateBackend, copy_gb_per_s: float, copy: str, *, quick: bool
) -> Iterator[Row]:
    """Rows for each case, beside the ceiling of copies and a copy of as many bytes."""
    for case in CASES[3:4] if quick else CASES:
        _, size = _step(backend, case, BATCH)
        steps = [_step(backend, case, BATCH)[0] for _ in range(buffer_sets(size))]
        name = f"state {case.kind}, {BATCH} x {'x'.join(map(str, case.shape))}, {case.model}"
        row = time_graph(name, steps, size)
        at_ceiling = {copy: size / copy_gb_per_s / 1e3, COPY: copy_us(backend.device, size)}
        yield against(row, at_ceiling)
    delta = CASES[3]
    for tokens in _PROMPTS[:1] if quick else _PROMPTS:
        step, size = _step(backend, delta, 1, tokens)
        name = f"state delta, a chunk of {tokens} tokens, {delta.model}"
        row = time_graph(name, [step], size)
        chunked = _chunked(delta, tokens, backend.device)
        found = {} if chunked is None else {"fla": time_graph(name, [chunked], size).median_us}
        yield against(row, found)


def _step(
    backend: StateBackend, case: StateCase, num_seqs: int, num_tokens: int = 1
) -> tuple[Callable[[], object], int]:
    """A call, and the bytes that it moves."""
    device, rows = backend.device, num_seqs * num_tokens
    is_conv, kind = case.kind == "conv", torch.bfloat16

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    state = random(2 * num_seqs, *case.shape).to(kind if is_conv else torch.float32)
    slots = torch.randperm(2 * num_seqs, device=device)[:num_seqs].int()
    starts = None
    if num_tokens > 1:
        starts = torch.arange(0, rows + 1, num_tokens, dtype=torch.int32, device=device)
    batch = StateBatch(slots, slots, starts)
    size = 2 * num_seqs * state[0].nbytes
    if is_conv:
        channels, width = case.heads
        x, terms = random(rows, channels).to(kind), random(channels, width).to(kind)
        out, conv = torch.empty_like(x), ShortConvTerms(terms, silu=True)
        size += x.nbytes + out.nbytes + terms.nbytes
        return lambda: backend.short_conv_step(x, state, batch, conv, out=out), size
    heads, key_heads = case.heads
    key_dim, value_dim = case.dims
    query, key = (random(rows, key_heads, key_dim).to(kind) for _ in range(2))
    value, out = (random(rows, heads, value_dim).to(kind) for _ in range(2))
    beta: Tensor | None = random(rows, heads).sigmoid().to(kind)
    linear = LinearAttentionTerms(key_dim**-0.5, delta_rule=True, l2norm=True)
    if case.kind == "mamba":
        gate = DecayGate(-random(heads).exp(), random(heads))
        linear = LinearAttentionTerms(1.0, delta_rule=False, gate=gate, skip=random(heads))
        decay, beta = random(rows, heads).to(kind), None
    else:
        decay = -random(rows, heads, *([key_dim] if case.kind == "KDA" else [])).exp()
    given = (query, key, value, decay, *([] if beta is None else [beta]), out)
    size += sum(each.nbytes for each in given)
    call = backend.linear_attention_step
    return lambda: call(query, key, value, decay, beta, state, batch, linear, out=out), size


def _chunked(case: StateCase, num_tokens: int, device: torch.device) -> Callable[[], object] | None:
    """The chunked kernels of flash-linear-attention for one prompt; None: not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    heads, key_heads = case.heads
    key_dim, value_dim = case.dims

    def random(*shape: int) -> Tensor:
        return torch.randn(1, num_tokens, *shape, device=device)

    query, key = (
        random(key_heads, key_dim).bfloat16().repeat_interleave(heads // key_heads, 2)
        for _ in range(2)
    )
    value, beta = random(heads, value_dim).bfloat16(), random(heads).sigmoid().bfloat16()
    decay = -random(heads).exp()
    state = torch.randn(1, heads, key_dim, value_dim, device=device)

    def step() -> object:
        with torch.inference_mode():
            return rule(
                query, key, value, g=decay, beta=beta, initial_state=state,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

    return step
