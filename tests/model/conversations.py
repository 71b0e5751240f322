"""Conversations with a tiny Qwen3.5: no token differs, and each turn finds the one before.

`python -m tests.model.conversations [--turns 10000]` prints what agents' turns through the engine
gave, beside passes without a cache, and how much of each turn the next one finds at the server.
"""

import argparse
import random
import time
from collections import Counter
from dataclasses import replace

import httpx
import torch

import backends
import kvcore
from model import EngineConfig, SamplingParams
from model.async_engine import AsyncEngine
from model.control.submission import Submission
from model.engine import Engine
from model.serve.config import ServeConfig
from tests.model.networks import ByteCodec
from tests.model.serve.conftest import DEADLINE_S, Served
from tests.model.tiny_configs import make_config
from tests.model.walk import build_network

KIND = "Qwen3_5TextConfig"
ROUNDING = 1e-3  # of a logit, between a text in pieces and as a whole
LONGEST = 150


class Agents:
    """Agents that call tools: each turn adds the answer and what a tool said to the text before.

    Args:
        seed: of all that is drawn.
        sizes: fields of the engine's configuration.

    Attributes:
        turns: the prompt and the answer of each turn.
        counts: of turns that began anew, went on and branched off.
    """

    def __init__(self, seed, **sizes):
        self._draw = random.Random(seed)
        self.model = build_network(make_config(KIND, ""), 1)
        config = {
            "block_size": 4,
            "num_blocks": 50,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 48,
            "swap_memory_bytes": 1 << 15,
            "drafts": "ngram",
        }
        self.engine = Engine(
            self.model, backends.get_backend("numba"), EngineConfig(**config | sizes)
        )
        self._system = self._tokens(30)
        self._results = [self._tokens(self._draw.randrange(1, 12)) for _ in range(20)]
        self._texts = []  # with the places where turns ended
        self.turns = []
        self.counts = Counter()

    def _tokens(self, count):
        return [self._draw.randrange(300) for _ in range(count)]

    def _prompt(self):
        """A new conversation, the next turn of one, or another one from where a turn had ended."""
        chance = self._draw.random()
        if not self._texts or chance < 0.05:
            self.counts["new"] += 1
            return [*self._system, *self._tokens(self._draw.randrange(2, 20))], ()
        place = self._draw.randrange(len(self._texts))
        text, ends = self._texts[place]
        if chance < 0.25:
            self.counts["branched"] += 1
            ends = ends[: self._draw.randrange(len(ends)) + 1]
            text = text[: ends[-1]]
        else:
            self.counts["went on"] += 1
            del self._texts[place]
        return [*text, *self._draw.choice(self._results)], ends

    def run(self, turns):
        """Run that many turns, several at a time."""
        running = {}
        while len(self.turns) < turns:
            while len(running) < 10:
                prompt, ends = self._prompt()
                most = self._draw.choice([4, 8, 12, 30])
                asked = Submission(
                    prompt,
                    SamplingParams(
                        n=self._draw.choice([1, 1, 1, 1, 2]), max_tokens=most, ignore_eos=True
                    ),
                    priority=self._draw.randrange(2),
                )
                for request in self.engine.submit(asked):
                    running[request.request_id] = request, ends
            self.engine.step()
            for request, ends in [one for one in running.values() if one[0].is_finished]:
                del running[request.request_id]
                prompt, answer = list(request.prompt_tokens), list(request.output_tokens)
                self.turns.append((prompt, answer))
                text = prompt + answer
                if len(text) < LONGEST:
                    self._texts.append((text, (*ends, len(text))))
        for request, _ in running.values():
            self.engine.abort(request)
        while self.engine.has_unfinished:
            self.engine.step()
        kvcore.check(self.engine.kv)
        assert self.engine.kv.num_free_blocks == self.engine.kv.num_usable_blocks

    def num_differing(self, batch=32):
        """How many of all answers' tokens are not the best after one pass over the whole text."""
        network, differing = self.model.network, 0
        current = network.config._attn_implementation
        network.set_attn_implementation(self.model.dense_implementation)
        ordered = sorted(self.turns, key=lambda turn: len(turn[0]) + len(turn[1]))
        for start in range(0, len(ordered), batch):
            part = ordered[start : start + batch]
            texts = [torch.tensor(prompt + answer) for prompt, answer in part]
            padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # behind the text
            with torch.inference_mode():
                logits = network(input_ids=padded, use_cache=False).logits
            for row, (prompt, answer) in zip(logits, part, strict=True):
                said = row[len(prompt) - 1 : len(prompt) + len(answer) - 1]
                chosen = said.gather(1, torch.tensor(answer)[:, None])[:, 0]
                differing += int((chosen < said.max(1).values - ROUNDING).sum())
        network.set_attn_implementation(current)
        return differing


class ChatML(ByteCodec):
    """Tokens of bytes, and the chat template of Qwen's models."""

    def encode_chat(self, messages, *, opens_answer=True, options=None):
        """An answer that was given is written as it was opened."""
        said = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
        return self.encode("".join([*said, "<|im_start|>assistant\n" if opens_answer else ""]))


def growing(codec, turns=6, block_size=16, question=300, answer=40):
    """Yield for each turn of a conversation with the server what it found of the turn before.

    Yields:
        The number of tokens of the prompt; how many of them were found in the cache; of the tokens
        that the turn before had computed, its answer included, the share that was found.
    """
    config = make_config(KIND, "")
    config.max_position_embeddings = 1 << 14
    model = replace(build_network(config, 1), codec=codec)
    with torch.no_grad():  # it answers in letters, so that an answer comes back as the same tokens
        model.network.lm_head.weight[128:] = 0
        model.network.lm_head.weight[:32] = 0

    def engine():
        sizes = EngineConfig(block_size=block_size, num_blocks=2000)
        return Engine(model, backends.get_backend("numba"), sizes)

    messages, before = [{"role": "system", "content": "Be brief. " * 20}], None
    draw = random.Random(3)
    with (
        Served(AsyncEngine(engine), ServeConfig(port=0)) as running,
        httpx.Client(base_url=running.url, timeout=DEADLINE_S) as client,
    ):
        for _ in range(turns):
            content = "".join(draw.choices("abcdefgh ", k=question))
            messages.append({"role": "user", "content": content})
            body = {"messages": messages, "max_tokens": answer, "temperature": 0}
            said = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage = said["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            share = None if before is None else (found - before[0]) / (before[1] - before[0])
            yield usage["prompt_tokens"], found, share
            before = found, usage["total_tokens"] - 1  # that of the last token is not computed
            messages.append(said["choices"][0]["message"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    agents, begun = Agents(0), time.perf_counter()
    agents.run(options.turns)
    stats, kv = agents.engine.stats, agents.engine.kv
    print(f"{len(agents.turns)} turns: {dict(agents.counts)}, {stats.num_forks} forks")
    print(f"{sum(len(answer) for _, answer in agents.turns)} tokens, {kv.num_blocks} blocks")
    print(f"{stats.num_preemptions} preemptions, {stats.num_swaps} swaps, {stats.num_loads} loads")
    print(f"{stats.num_draft_tokens} draft tokens, {stats.num_accepted_tokens} accepted")
    print(f"{stats.num_hit_tokens} of {stats.num_prompt_tokens} prompt tokens hit")
    print(f"{time.perf_counter() - begun:.0f} s; {agents.num_differing()} tokens differ")
    for codec in (ChatML(), ByteCodec()):
        print(f"{type(codec).__name__}: tokens of the prompt, found, share of the turn before's")
        for length, found, share in growing(codec):
            print(f"{length:6} {found:6} {'' if share is None else format(share, '.3f')}")


if __name__ == "__main__":
    main()
