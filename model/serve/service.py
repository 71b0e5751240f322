"""What all routes share: the engine, what its model is called, and when it serves.

Invariants: a model that is not here is a 404, an engine that is not ready a 503.

Does not know: routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING

from model.async_engine import AsyncEngine
from model.control.images import PromptImages, take_images
from model.errors import InvalidArgumentError
from model.serve.config import ServeConfig
from model.serve.conversation import ConversationOptions, ImagePart, Message, conversation
from model.serve.errors import ApiError, api_error
from model.serve.gate import ids
from model.serve.image_urls import fetch
from model.serve.reading import Reading, reading_of
from model.serve.tools import call_ids
from model.turns import Turns, in_turn

if TYPE_CHECKING:  # torch is not loaded before an engine is made
    from model.engine_core import EngineCore

_OPENERS = 8  # threads that wait for images, apart from those that make tokens
_MANY = 256  # messages; images are looked for in more on a thread of their own
_LONG = 4096  # characters or tokens; more are made to each other on a thread of their own


class Service:
    """What is served.

    Attributes:
        engine: runs it.
        name: what clients call the model; the first of its names.
        config: how clients are met.
        created: when it was made, in seconds of the epoch.
        client_turns: of the clients, for what is computed beside the engine.
    """

    def __init__(self, engine: AsyncEngine, names: Sequence[str], config: ServeConfig) -> None:
        self.engine = engine
        self.name = names[0]
        self._own_names = tuple(dict.fromkeys(names))
        self.config = config
        self.created = self.now()
        self.client_turns = Turns()
        self._ids = ids()
        self._call_ids = call_ids()
        self._openers = ThreadPoolExecutor(_OPENERS, "image")

    def now(self) -> int:
        """Seconds of the epoch. O(1)."""
        return int(time.time())

    def new_id(self, kind: str) -> str:
        """A name that no other answer has. O(1)."""
        return f"{kind}-{next(self._ids)}"

    def new_call_id(self) -> str:
        """Return an id that no other call has. O(1)."""
        return next(self._call_ids)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may give: the model's, then those of its LoRA adapters."""
        return *self._own_names, *self.engine.engine.adapter_names

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that a request names as its model; None: the model itself. O(1)."""
        return None if name in self._own_names else name

    def check_model(self, name: str | None) -> None:
        """Raise unless this is served, or none is named. O(adapters)."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: wanted {' or '.join(map(repr, self.names))}, got {name!r:.100}",
                param="model",
                code="model_not_found",
            )

    def serving(self) -> EngineCore:
        """The engine, if it takes requests. O(1)."""
        health = self.engine.health
        if not health.is_ready:
            raise ApiError(503, f"the engine is {health.state.value}", code="not_serving")
        return self.engine.engine

    def checked(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens that the model has. O(tokens)."""
        size = self.engine.engine.vocab_size
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < size:
                raise ApiError(
                    400, f"tokens: wanted ids from 0 to {size - 1}, got {token}", param="tokens"
                )
        return tokens

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens that the model has. O(tokens)."""
        await in_turn(partial(self.checked, tokens), is_long=len(tokens) > _LONG)
        return "".join([piece async for piece in self.decoded(tokens)])

    async def decoded(self, tokens: Sequence[int]) -> AsyncIterator[str]:
        """The text of tokens that were checked, in pieces, each in the client's turn."""
        loaded = import_module("model.load.text")
        pieces = loaded.pieces(self.engine.engine.model.codec.decode, tokens, _LONG)
        work = partial(next, pieces, None)
        while (piece := await in_turn(work, is_long=len(tokens) > _LONG)) is not None:
            yield piece

    @cached_property
    def sampling_defaults(self) -> Mapping[str, object]:
        """The sampling parameters of requests that do not give them. O(1)."""
        return self.config.sampling_defaults(self.engine.engine)

    @cached_property
    def reading(self) -> Reading:
        """How the model's answers are read; wanted only while it is served. Once O(template)."""
        return reading_of(self.engine.engine, self.config)

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text. O(text)."""
        codec = self.engine.engine.model.codec
        try:
            return await in_turn(partial(codec.encode, text), is_long=len(text) > _LONG)
        except InvalidArgumentError as error:
            raise api_error(error) from error

    async def turns(
        self,
        messages: Sequence[Message],
        prompt: Sequence[int],
        options: ConversationOptions,
    ) -> tuple[int, ...]:
        """Where the last user's turn begins in a prompt, and where the answer's opening does.

        The next turn parts from this one there, so states of recurrent layers are wanted there;
        empty for a model without them. O(text of the conversation).
        """
        if not self.engine.engine.keeps_states:
            return ()
        users = [number for number, one in enumerate(messages) if one.role == "user"]
        found: list[int] = []
        closed = options.model_copy(
            update={"add_generation_prompt": False, "continue_final_message": None}
        )
        for part in {len(messages), *users[-1:]} - {0}:
            try:
                tokens = await self.encode_chat(messages[:part], closed)
            except ApiError:  # a template may refuse a part
                continue
            pairs = enumerate(zip(tokens, prompt, strict=False))
            parted = next((place for place, (one, two) in pairs if one != two), len(tokens))
            found.append(min(parted, len(prompt)))
        return tuple(sorted(found))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        options: ConversationOptions,
    ) -> list[int]:
        """The tokens of a conversation. O(its text)."""
        return (await self.read_chat(messages, options))[0]

    async def read_chat(
        self, messages: Sequence[Message], options: ConversationOptions
    ) -> tuple[list[int], PromptImages | None]:
        """The tokens of a conversation, and its images. O(its text + pixels).

        Raises:
            ApiError: an image cannot be had, or something is refused.
        """
        engine = self.engine.engine

        def encoded() -> tuple[list[int], PromptImages | None]:
            return engine.encode_chat(
                *take_images(conversation(messages)),
                opens_answer=options.opens_answer,
                options=self.config.template_options | options.template_options,
            )

        def images() -> list[ImagePart]:
            return [part for message in messages for part in message.images]

        parts = await in_turn(images, is_long=len(messages) >= _MANY)
        try:
            away = [part for part in parts if not part.is_here]
            if away:
                self._check_urls()
            engine.check_images(len(parts))
            for part in parts:
                if part.is_here:
                    part.check(engine.image_limits[1])
                    await in_turn(partial(part.open, self.fetch))
            run = partial(asyncio.get_running_loop().run_in_executor, self._openers)
            await asyncio.gather(*[run(part.open, self.fetch) for part in away])
            return await in_turn(encoded)
        except InvalidArgumentError as error:
            own = options.chat_template_kwargs or {}
            names = {"prompt": "messages", "enable_thinking": "reasoning_effort"}
            names |= {name: f"chat_template_kwargs.{name}" for name in own}
            raise api_error(error, names) from error

    async def begun_answer(
        self, messages: Sequence[Message], options: ConversationOptions
    ) -> list[int]:
        """Return the end of a prompt with which reading its answer starts. O(its text).

        It is what the template has appended to the last message, or the last message if the answer
        continues that. `read_chat` has accepted the conversation.
        """
        codec = self.engine.engine.model.codec

        def begun() -> list[int]:
            text = codec.begun_answer(
                take_images(conversation(messages))[0],
                opens_answer=options.opens_answer,
                options=self.config.template_options | options.template_options,
            )
            return codec.encode(text, adds_special_tokens=False)

        return await in_turn(begun)

    def fetch(self, url: str) -> bytes:
        """The bytes behind a URL of an image, if that is allowed; waits for them.

        Raises:
            InvalidArgumentError: it is not, or they cannot be had.
        """
        self._check_urls()
        return fetch(url, self.engine.engine.image_limits[1], self.config.image_url_timeout_s)

    def _check_urls(self) -> None:
        """Refuse URLs of images, unless they may be fetched. O(1)."""
        if not self.config.allow_image_urls:
            raise InvalidArgumentError(
                "image_url: wanted a data: URL; --allow-image-urls allows others"
            )
