"""Which requests a benchmark sends: their tokens, their lengths, what follows what.

Decides the workloads. Invariants: a workload is a function of its parameters and its seed alone,
the same in every process; lengths do not depend on the vocabulary.

- `uniform` is nano-vLLM's: prompts and outputs of lengths drawn evenly, tokens drawn evenly below
  10,001, from Python's generator, in the same order; so 256 requests of 100 to 1024 tokens with
  seed 0 are the very requests of its benchmark, with 133,966 output tokens.
- `chat`: conversations that begin with one shared system prompt; a turn is sent when the one before
  it has been answered, and contains it, its answer and a new message.
- `shared-prefix`: one long beginning, and an ending for each request.
- `copy`: prompts that say the same several times, for drafts that look it up.

Does not know: engines, models, time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from model.control.settings import check_settings, setting
from model.errors import InvalidArgumentError

Workload = Literal["uniform", "chat", "shared-prefix", "copy"]
"""Workloads that serve requests."""

_TOKEN_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """A length is drawn evenly from `low` to `high`, both included."""

    WANTED: ClassVar[str] = "N or LOW:HIGH with 1 <= LOW <= HIGH"

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise InvalidArgumentError(
                f"length: wanted LOW:HIGH with 1 <= LOW <= HIGH, got {self.low}:{self.high}"
            )

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read LOW:HIGH, or N for N:N. O(text).

        Raises:
            ValueError: it is neither.
        """
        low, _, high = text.partition(":")
        return cls(int(low), int(high or low))


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        tokens: its own tokens; the whole prompt unless it follows another request.
        max_tokens: the tokens to generate, exactly.
        follows: the number of the request whose prompt and answer come before `tokens`, and which
            must have been answered before this one is sent; None: it can be sent at once.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    follows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parameters of a workload."""

    num_requests: int = setting(256, help="how many", least=1)
    input_len: Span = setting(
        Span(100, 1024),
        help="tokens of a prompt, without what it shares; N is N:N",
        metavar="LOW:HIGH",
    )
    output_len: Span = setting(Span(100, 1024), help="tokens generated", metavar="LOW:HIGH")
    prefix_len: int = setting(0, help="tokens that all prompts begin with", least=0)
    turns: int = setting(1, help="requests of a conversation", least=1)
    copies: int = setting(1, help="how often a prompt says what is its own", least=1)

    def __post_init__(self) -> None:
        check_settings(self)


SHAPES: dict[str, Shape] = {
    "uniform": Shape(),
    "chat": Shape(
        num_requests=128,
        input_len=Span(16, 96),
        output_len=Span(16, 128),
        prefix_len=96,
        turns=4,
    ),
    "shared-prefix": Shape(
        num_requests=64, input_len=Span(16, 64), output_len=Span(16, 64), prefix_len=512
    ),
    "copy": Shape(num_requests=8, input_len=Span(32, 64), output_len=Span(128, 128), copies=4),
}
"""The workloads that serve requests, with their usual parameters."""


def make_requests(shape: Shape, *, vocab_size: int, seed: int = 0) -> list[BenchRequest]:
    """The requests of a workload, in the order in which they are sent. O(all tokens).

    Conversations are sent turn by turn: the first turns of all of them, then the second ones.
    """
    draw = random.Random(seed)  # noqa: S311  # a benchmark repeats
    prefix = _tokens(draw, shape.prefix_len, vocab_size)
    prompts = [
        _tokens(draw, draw.randint(shape.input_len.low, shape.input_len.high), vocab_size)
        * shape.copies
        for _ in range(shape.num_requests)
    ]
    outputs = [
        draw.randint(shape.output_len.low, shape.output_len.high) for _ in range(shape.num_requests)
    ]
    conversations = -(-shape.num_requests // shape.turns)
    return [
        BenchRequest(prefix + prompt, output)
        if number < conversations
        else BenchRequest(prompt, output, follows=number - conversations)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def total_lengths(requests: Sequence[BenchRequest]) -> list[int]:
    """The tokens that each request comes to, what it follows included. O(num_requests)."""
    totals: list[int] = []
    for request in requests:
        before = 0 if request.follows is None else totals[request.follows]
        totals.append(before + len(request.tokens) + request.max_tokens)
    return totals


def _tokens(draw: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple([draw.randint(0, _TOKEN_LIMIT) % vocab_size for _ in range(count)])
