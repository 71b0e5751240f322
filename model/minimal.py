"""A whole engine, to be read first: `python -m model.minimal "If the file does not exist,"`.

Continuous batching, chunked prefill, prefix caching, preemption and speculative decoding, first
come, first served. kvcore decides where keys and values are stored, a backend computes attention
over the blocks, Transformers provides the rest; greedy output equals its `generate`. Read it from
`Engine.step` outwards; "Full version" names the counterpart in the full engine, which adds windows,
chunks, soft caps and sinks (refused here), asynchronous scheduling, CUDA graphs, streams and more.
"""

import argparse
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

import kvcore
from backends import AttentionTerms, Backend, BackendError, KVCache, PagedBatch, get_backend
from model.errors import InvalidArgumentError, ModelError, UnsupportedModelError
from model.load.loader import load_codec
from model.tiny import CHECKPOINT_DIR


# Full version: model.control.request.Request
@dataclass(eq=False)
class Request:
    """A prompt to continue."""

    prompt_tokens: list[int]
    max_tokens: int
    temperature: float = 0.0  # 0: greedy
    output_tokens: list[int] = field(default_factory=list)
    seq: kvcore.KVSequence | None = None  # its block table while it runs; None: it does not run

    @property
    def num_missing_tokens(self) -> int:
        """Output tokens that are still to be generated."""
        return self.max_tokens - len(self.output_tokens)


# Full version: model.control.step.Chunk
@dataclass
class Chunk:
    """The tokens of one request that a step computes."""

    request: Request
    seq: kvcore.KVSequence
    start: int  # position of the first token to compute
    num_tokens: int  # to compute, drafts included
    draft_tokens: list[int]  # guesses of the next tokens; the last tokens of the chunk

    @property
    def num_logits(self) -> int:
        """The rows of logits that it needs: none unless it reaches the end of the known tokens."""
        reaches_end = self.start + self.num_tokens == self.seq.num_tokens
        return 1 + len(self.draft_tokens) if reaches_end else 0


# Full version: model.attention.attention.attend
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,  # the batch says which keys a query attends to
    *,
    paged: tuple[Backend, list[KVCache], PagedBatch],
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Store the new keys and values [1, num_kv_heads, num_tokens, head_dim], then attend."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if others.get(name) is not None:
            raise UnsupportedModelError(f"{name}: wanted a model without, use python -m model.run")
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    backend, caches, batch = paged
    cache = caches[int(str(module.layer_idx))]
    backend.store_kv(key, value, cache, batch.slot_mapping)
    terms = AttentionTerms(scale=scaling or query.shape[-1] ** -0.5)
    return backend.paged_attention(query, cache, batch, terms)[None], None


AttentionInterface.register("kvcore_minimal", attend)


# Full version: model.control.drafts.NgramDrafts.propose
def propose(tokens: Sequence[int], limit: int) -> list[int]:
    """Guess draft tokens: what followed the last two tokens where they occurred before."""
    for end in range(len(tokens) - 1, 1, -1):
        if limit > 0 and tokens[end - 2 : end] == tokens[-2:]:
            return list(tokens[end : end + limit])
    return []


# Full version: model.control.drafts.accepted_tokens
def verify(sampled: Sequence[int], draft_tokens: Sequence[int]) -> list[int]:
    """Keep the sampled tokens up to the first that differs from its draft (arXiv:2211.17192)."""
    matches = [token == draft for token, draft in zip(sampled, draft_tokens, strict=False)]
    return list(sampled[: [*matches, False].index(False) + 1])


# Full version: model.sample.request_sampler.RequestSampler.draw
def sample(logits: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> list[int]:
    """Draw a token from each row of `logits`, [num_rows, vocab_size]."""
    tokens = logits.argmax(-1)
    if any(temperatures):  # a tiny temperature is as good as greedy
        scale = torch.tensor(temperatures, device=logits.device).clamp(min=1e-6)
        chances = (logits.float() / scale[:, None]).softmax(-1)
        tokens = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return [int(token) for token in tokens.tolist()]


# Full version: model.engine_core.EngineCore
class Engine:
    """Runs requests on a Transformers decoder whose layers all have full attention."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        num_draft_tokens: int = 0,  # per request and step; 0: no speculative decoding
    ) -> None:
        self.model, self.backend, config = model, backend, model.config
        if {*(getattr(config, "layer_types", None) or ["full_attention"])} != {"full_attention"}:
            raise UnsupportedModelError("layer_types: wanted full ones, use python -m model.run")
        nn.Module.to(model, backend.device)
        model.set_attn_implementation("kvcore_minimal")
        self.kv = kvcore.KVCacheManager(num_blocks, block_size)
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        shape = (num_blocks, block_size, config.num_key_value_heads, head_dim)
        zeros = torch.zeros(shape, dtype=model.dtype, device=backend.device)
        layers = range(config.num_hidden_layers)
        self.caches = [KVCache(zeros.clone(), zeros.clone()) for _ in layers]
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.num_draft_tokens, self.max_positions = num_draft_tokens, config.max_position_embeddings
        self.generator = torch.Generator(backend.device).manual_seed(0)
        self.waiting, self.running = deque[Request](), list[Request]()
        self.stats: Counter[str] = Counter()

    # Full version: model.engine_core.EngineCore.submit
    def add_request(self, request: Request) -> None:
        """Queue a request. Raises InvalidArgumentError if it could never run."""
        room = min(self.kv.num_usable_blocks * self.kv.block_size, self.max_positions)
        if not 0 < len(request.prompt_tokens) <= room - request.max_tokens < room:
            raise InvalidArgumentError(
                f"request: wanted a prompt and max_tokens of at least 1 and at most {room} in all, "
                f"got {len(request.prompt_tokens)} tokens and max_tokens={request.max_tokens}"
            )
        self.waiting.append(request)

    # Full version: model.engine_core.EngineCore.step
    def step(self) -> None:
        """Run one forward pass."""
        chunks = self.schedule()
        ids, positions, rows, batch = self.prepare_batch(chunks)
        paged = (self.backend, self.caches, batch)
        with torch.inference_mode():
            logits = self.model(
                ids, position_ids=positions, logits_to_keep=rows, use_cache=False, paged=paged
            ).logits[0]
        temperatures = [each.request.temperature for each in chunks for _ in range(each.num_logits)]
        sampled = iter(sample(logits, temperatures, self.generator))
        for chunk in chunks:
            self.process_output(chunk, [next(sampled) for _ in range(chunk.num_logits)])

    # Full version: model.control.scheduler.Scheduler.schedule
    def schedule(self) -> list[Chunk]:
        """Choose the tokens of a step, in order of arrival, and reserve their blocks.

        A running request that finds no block preempts the last one. A waiting request starts when
        its tokens fit and leave a block for each running one.
        """
        budget, chunks = self.max_num_batched_tokens, list[Chunk]()
        for request in list(self.running):
            while budget and request.seq is not None:
                try:
                    chunks.append(self._reserve(request, request.seq, budget))
                    budget -= chunks[-1].num_tokens
                    break
                except kvcore.OutOfBlocksError:
                    self.preempt(self.running[-1])
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            tokens = request.prompt_tokens + request.output_tokens
            if not self.kv.plan(tokens).fits_above(len(self.running)):
                break
            request.seq = self.kv.open(tokens)
            self.stats["cached_tokens"] += request.seq.num_cached_tokens
            self.running.append(self.waiting.popleft())
            chunks.append(self._reserve(request, request.seq, budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def _reserve(self, request: Request, seq: kvcore.KVSequence, budget: int) -> Chunk:
        """Reserve blocks for the next chunk of a request, or raise and change nothing."""
        start = seq.num_computed_tokens
        count = min(seq.num_tokens - start, budget)
        self.kv.reserve(seq, count)
        limit = min(self.num_draft_tokens, budget - count, request.num_missing_tokens - 1)
        drafts = propose(seq.tokens, limit) if start + count == seq.num_tokens else []
        if not self.kv.can_reserve(seq, count + len(drafts)):
            drafts = []
        self.kv.extend(seq, drafts)
        self.kv.reserve(seq, count + len(drafts))
        return Chunk(request, seq, start, count + len(drafts), drafts)

    # Full version: model.control.scheduler.Scheduler._preempt
    def preempt(self, request: Request) -> None:
        """Free the blocks of a running request and queue it again, before all others."""
        self._close(request)
        self.waiting.appendleft(request)
        self.stats["preemptions"] += 1

    # Full version: model.attention.batch.BatchBuilder.build
    def prepare_batch(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
        """Make token ids and positions [1, num_tokens], rows of logits to keep, and the batch."""
        ends = [chunk.start + chunk.num_tokens for chunk in chunks]
        columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        (tokens, positions, rows), starts = columns, [0]
        width = max(len(chunk.seq.block_table) for chunk in chunks)
        table = torch.zeros((len(chunks), width), dtype=torch.int32)
        slots = torch.empty(sum(chunk.num_tokens for chunk in chunks), dtype=torch.int64)
        for number, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            chunk.seq.write_block_table(table[number].numpy())
            chunk.seq.write_slot_mapping(chunk.start, end, slots[starts[-1] :].numpy())
            tokens += chunk.seq.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            starts.append(len(tokens))
            rows += range(starts[-1] - chunk.num_logits, starts[-1])
        device = self.backend.device
        batch = PagedBatch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slot_mapping=slots.to(device),
            max_query_len=max(chunk.num_tokens for chunk in chunks),
            max_seq_len=max(ends),
        )
        ids, at, kept = (torch.tensor(x, dtype=torch.int64, device=device) for x in columns)
        return ids[None], at[None], kept, batch

    # Full version: model.control.scheduler.Scheduler.update
    def process_output(self, chunk: Chunk, sampled: Sequence[int]) -> None:
        """Commit what was computed, so that other requests can share it; add the new tokens."""
        request, seq = chunk.request, chunk.seq
        tokens = verify(sampled, chunk.draft_tokens) if sampled else []
        self.kv.commit(seq, chunk.num_tokens - (len(sampled) - len(tokens)))
        if tokens:
            self.stats["accepted_draft_tokens"] += len(tokens) - 1
            self.kv.truncate(seq, seq.num_computed_tokens)  # removes the rejected draft tokens
            self.kv.append(seq, tokens[-1])
            request.output_tokens += tokens
            if not request.num_missing_tokens:
                self._close(request)

    def _close(self, request: Request) -> None:
        if request.seq is not None:
            self.kv.close(request.seq)
        self.running.remove(request)
        request.seq = None

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run requests until all have finished; return their output tokens, in the same order."""
        for request in requests:
            self.add_request(request)
        while self.waiting or self.running:
            self.step()
        return [request.output_tokens for request in requests]


def main() -> None:
    """Continue texts with an engine that fits in one file."""
    parser = argparse.ArgumentParser(prog="python -m model.minimal", description=main.__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default=CHECKPOINT_DIR, help="folder of a checkpoint")
    parser.add_argument("--backend", default="auto", choices=["auto", "numba", "triton"])
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens per prompt")
    parser.add_argument("--draft-tokens", type=int, default=0, help="n-gram drafts per step")
    options = parser.parse_args()
    try:
        backend, codec = get_backend(options.backend), load_codec(str(options.model))
        model = AutoModelForCausalLM.from_pretrained(options.model)
        requests = [Request(codec.encode(text), options.max_tokens) for text in options.prompts]
        Engine(model, backend, num_draft_tokens=options.draft_tokens).generate(requests)
    except (ModelError, BackendError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    for request in requests:
        tokens = request.prompt_tokens + request.output_tokens
        print(repr(codec.decode(tokens, skip_special_tokens=False)))


if __name__ == "__main__":
    main()
