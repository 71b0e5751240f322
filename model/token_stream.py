"""The results of an asynchronous engine: the samples of prompts, as they come.

Decides: that text is decoded when it is taken, so that a slow reader costs less, not more; with
stop strings at once, because they end a sample.

Invariants: it belongs to one event loop. Every token is in exactly one `Delta`; a stream ends with
the last token of its samples, or by an error.

Does not know: the engine, threads.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from model.control.request import FinishReason, Request, SampledToken
from model.errors import ModelError


class Delta(NamedTuple):
    """The new text and tokens of one sample since the last `Delta`.

    Attributes:
        sample: its number, from 0.
        text: the text that became final; never part of a character.
        tokens: the sampled tokens, with log-probabilities if the parameters ask for them.
        finish_reason: the reason why it has ended; None: it has not.
        error: the error that ended it with `FinishReason.ERROR`.
    """

    sample: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
    error: ModelError | None = None


class Text(Protocol):
    """A text that grows token by token: `model.load.text.TextStream`, or another one."""

    @property
    def is_stopped(self) -> bool:
        """True if a stop string has ended it."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended it."""
        ...

    def add(self, token: int) -> None:
        """Add a token."""
        ...

    def take(self) -> str:
        """Return the text that became final since the last call."""
        ...

    def close(self) -> None:
        """State that no token follows."""
        ...


class Sample:
    """One continuation of a prompt, as the loop sees it.

    Attributes:
        number: its number among the samples of its stream.
        request: the engine's request; only fields that never change are read here.
        tokens: all tokens so far.
        finish_reason: the reason why it has ended; None: it goes on.
        error: the error that has ended it alone.
        arrived_s, first_s, last_s: the times of its submission, and of its first and last tokens.
    """

    __slots__ = (
        "_num_taken",
        "_text",
        "_told_reason",
        "arrived_s",
        "error",
        "finish_reason",
        "first_s",
        "last_s",
        "number",
        "request",
        "tokens",
    )

    def __init__(self, number: int, request: Request, text: Text, arrived_s: float) -> None:
        self.number = number
        self.request = request
        self.tokens: list[SampledToken] = []
        self.finish_reason: FinishReason | None = None
        self.error: ModelError | None = None
        self.arrived_s = self.first_s = self.last_s = arrived_s
        self._text = text
        self._num_taken = 0
        self._told_reason: FinishReason | None = None  # an error is the stream's, and raised by it

    def add(
        self,
        tokens: Sequence[SampledToken],
        reason: FinishReason | None,
        now_s: float,
        error: ModelError | None = None,
    ) -> bool:
        """Add the tokens of a step; return True if a stop string ends the sample here.

        O(1), and with stop strings O(text).
        """
        if not self.tokens:
            self.first_s = now_s
        self.last_s, self.error = now_s, error
        for token in tokens:
            self.tokens.append(token)
            self._text.add(token.token_id)
            if self._text.is_stopped:  # the tokens behind it are dropped
                break
        is_stopped = self._text.is_stopped
        self.finish_reason = self._told_reason = FinishReason.STOP if is_stopped else reason
        if self.finish_reason is not None:
            self._text.close()
        return is_stopped and reason is None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended it, or None. O(1)."""
        return self._text.stop_string

    @property
    def has_news(self) -> bool:
        """True if tokens have come that were not taken yet. O(1)."""
        return len(self.tokens) > self._num_taken

    def take(self) -> Delta:
        """Return what came since the last call. O(tokens since)."""
        tokens = tuple(self.tokens[self._num_taken :])
        self._num_taken += len(tokens)
        return Delta(self.number, self._text.take(), tokens, self._told_reason, self.error)


class TokenStream:
    """The samples of one prompt or of several, as they come: an asynchronous iterator of `Delta`.

    A slow reader gets all that came since its last read in one Delta. Use it in `async with`, or
    call `close`: unfinished samples are aborted then.

    Attributes:
        samples: in their order.
        on_first_token: called once, when the first token has come.
    """

    def __init__(self, abort: "Callable[[TokenStream], None]", samples: Sequence[Sample]) -> None:
        self.samples = tuple(samples)
        self.on_first_token: Callable[[], None] | None = None
        self._abort = abort
        self._news: deque[Sample] = deque()
        self._num_open = len(samples)
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once. O(samples)."""
        return sum([r.num_prompt_tokens for r in self._leaders])

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that were found in the cache, known with the first token. O(samples)."""
        return sum([r.num_cached_tokens for r in self._leaders])

    @property
    def num_output_tokens(self) -> int:
        """Tokens that have come so far. O(samples)."""
        return sum([len(sample.tokens) for sample in self.samples])

    @property
    def _leaders(self) -> list[Request]:
        return [s.request for s in self.samples if s.request.sample == 0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        await self._wait_for_news()
        if not self._news:
            raise StopAsyncIteration
        return self._news.popleft().take()

    async def news(self) -> list[Delta]:
        """Wait for news; return one Delta for each sample that has some. Empty: nothing more comes.

        Raises:
            EngineFaultError: the engine failed.
            NotServingError: it was stopped.
        """
        await self._wait_for_news()
        news, self._news = self._news, deque()
        return [sample.take() for sample in news]

    @property
    def is_over(self) -> bool:
        """True if everything has been taken, to the last token of each sample. O(1)."""
        return self._num_open == 0 and not self._news and self._error is None

    async def whole(self) -> list[Delta]:
        """Wait for the end; return the rest of each sample that was not taken before.

        Raises:
            EngineFaultError: the engine failed.
            NotServingError: it was stopped.
        """
        self._wants_all = True
        if self._news:
            self._announce()
        while self._num_open and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        self._news.clear()
        return [sample.take() for sample in self.samples]

    def close(self) -> None:
        """Abort the unfinished samples. O(samples)."""
        self._abort(self)

    async def _wait_for_news(self) -> None:
        while not self._news and (self._num_open or self._error is not None):
            if self._error is not None:
                raise self._error
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def tell(self, sample: Sample) -> None:
        """Note that a sample has news; for the maker of the stream. O(samples with news)."""
        if sample not in self._news:
            self._news.append(sample)
        if sample.finish_reason is not None:
            self._num_open -= 1
        self._announce()
        if not self._wants_all or self._num_open == 0:
            self._wake()

    def end(self, error: Exception) -> None:
        """End the stream with an error; for the maker of the stream. O(1)."""
        self._num_open = 0
        self._error = error
        self._wake()

    def _announce(self) -> None:
        if self.on_first_token is not None:
            self.on_first_token()
            self.on_first_token = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
