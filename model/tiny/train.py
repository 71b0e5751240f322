"""`python -m model.tiny.train`: makes the tiny checkpoint and its tokenizer from nothing.

Decides the training schedule: random windows of the training text, bf16 autocast, a short warm-up,
then a linear decay to zero. Invariants: no network access; the vocabulary and the weights see
training documents only; with --steps the same seed, interpreter, libraries and processor give the
same run. It does not know what the text says.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedTokenizerFast

from model.errors import InvalidArgumentError
from model.tiny import CHECKPOINT_DIR
from model.tiny.corpus import Document, gather, split
from model.tiny.network import (
    add_dropout,
    bits_per_byte,
    build_network,
    build_optimizers,
    next_token_loss,
)
from model.tiny.vocabulary import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE, learn_vocabulary

EVALUATION_WINDOW = 512
_REPORT_EVERY = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train and for how long: `steps`, or `minutes` where `steps` is None."""

    steps: int | None = None
    minutes: float = 12.0
    seed: int = 0
    rate: float = 8e-3
    tokens_per_step: int = 2048
    window: int = 256
    long_window: int = 512  # in every fourth step, so that prompt and answer stay in known range
    warmup_steps: int = 50
    dropout: float = 0.1
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Text:
    """Documents as one row of tokens, an end-of-text token after each.

    tokens: int64 [num_tokens]. num_bytes: of the documents in UTF-8, without the separators.
    """

    tokens: Tensor
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came out: bits a byte of the saved bf16 weights, and what the run took."""

    train_bits_per_byte: float
    held_out_bits_per_byte: float
    num_steps: int
    num_parameters: int
    seconds: float


def make_checkpoint(documents: Sequence[Document], out: Path, settings: Settings) -> Result:
    """Learn a vocabulary and train a network on the documents not held out; save both to `out`.

    Writes config.json, generation_config.json, model.safetensors (bf16), tokenizer.json and
    tokenizer_config.json.

    Raises:
        InvalidArgumentError: too little text to learn from, or none to hold out.
    """
    begin = time.monotonic()
    learn_from, held_out = split(documents)
    if not learn_from or not held_out:
        raise InvalidArgumentError(
            "documents: wanted some to learn from and some to hold out, "
            f"got {len(learn_from)} and {len(held_out)}"
        )
    torch.manual_seed(settings.seed)
    texts = [document.text for document in learn_from]
    tokenizer = learn_vocabulary(texts, vocab_size=settings.vocab_size)
    network = build_network(vocab_size=len(tokenizer), end_of_text_id=END_OF_TEXT_ID)
    handles = add_dropout(network, settings.dropout)
    num_steps = _train(network, encode(tokenizer, learn_from).tokens, settings)
    for handle in handles:
        handle.remove()
    weights: nn.Module = network  # the view of it that is typed
    weights.to(torch.bfloat16)
    network.generation_config.pad_token_id = network.config.eos_token_id  # `generate` asks for one
    tokenizer.save_pretrained(out, save_jinja_files=False)
    network.save_pretrained(out)
    weights.float()  # the saved numbers, as a CPU computes with them
    sample = learn_from[:: max(1, len(learn_from) // len(held_out))]
    return Result(
        train_bits_per_byte=measure(network, encode(tokenizer, sample)),
        held_out_bits_per_byte=measure(network, encode(tokenizer, held_out)),
        num_steps=num_steps,
        num_parameters=sum(p.numel() for p in network.parameters()),
        seconds=time.monotonic() - begin,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> Text:
    """The documents in order, each closed by the end-of-text token. O(number of characters)."""
    rows = tokenizer([document.text + END_OF_TEXT for document in documents], verbose=False)
    tokens = [token for row in rows["input_ids"] for token in row]
    num_bytes = sum(len(document.text.encode()) for document in documents)
    return Text(torch.tensor(tokens), num_bytes)


def measure(network: nn.Module, text: Text) -> float:
    """Bits a byte of a text that is long enough to fill several windows."""
    return bits_per_byte(network, text.tokens, text.num_bytes, EVALUATION_WINDOW)


def _train(network: nn.Module, tokens: Tensor, settings: Settings) -> int:
    """Train in place; the number of steps made."""
    if len(tokens) <= settings.long_window:
        raise InvalidArgumentError(
            f"documents: wanted more than {settings.long_window} tokens to learn from, "
            f"got {len(tokens)}"
        )
    optimizers = build_optimizers(network, rate=settings.rate)
    full_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(settings.seed)
    network.train()
    num_steps, recent = 0, torch.zeros(())
    for step, done in _schedule(settings):
        length = settings.long_window if step % 4 == 3 else settings.window
        windows = _random_windows(tokens, length, settings.tokens_per_step // length, generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(network, windows)
        torch.autograd.backward(loss)
        clip_grad_norm_(network.parameters(), 1.0)
        share = min(1.0, (step + 1) / settings.warmup_steps) * (1.0 - done)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, full_rate in zip(groups, full_rates, strict=True):
            group["lr"] = full_rate * share
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent += loss.detach()
        num_steps = step + 1
        if num_steps % _REPORT_EVERY == 0:
            nats = recent.item() / _REPORT_EVERY
            print(f"step {num_steps}  {done:4.0%}  {nats:.3f} nats a token", file=sys.stderr)
            recent.zero_()
    network.eval()
    return num_steps


def _schedule(settings: Settings) -> Iterator[tuple[int, float]]:
    """Each step's number and the share of the run that lies behind it, in [0, 1)."""
    begin, step, done = time.monotonic(), 0, 0.0
    while done < 1.0:
        yield step, done
        step += 1
        if settings.steps is None:
            done = (time.monotonic() - begin) / (60 * settings.minutes)
        else:
            done = step / settings.steps


def _random_windows(tokens: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """int64 [count, length + 1], each at a uniformly random place of the text."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length + 1)]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number above 0, got {text}")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"wanted a whole number above 0, got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; the result goes to stdout, progress to stderr."""
    parser = argparse.ArgumentParser(prog="python -m model.tiny.train", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=_positive, default=12.0, help="train this long")
    length.add_argument("--steps", type=_positive_int, help="or make exactly this many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=CHECKPOINT_DIR, help="folder to write to")
    parser.add_argument("--threads", type=_positive_int, default=2, help="of torch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = Settings(steps=options.steps, minutes=options.minutes, seed=options.seed)
    result = make_checkpoint(gather(), options.out, settings)
    print(f"parameters       {result.num_parameters}")
    print(f"steps            {result.num_steps} in {result.seconds:.0f} s")
    print(f"train            {result.train_bits_per_byte:.3f} bits a byte")
    print(f"held out         {result.held_out_bits_per_byte:.3f} bits a byte")
    print(f"written to       {options.out}")


if __name__ == "__main__":
    main()
