"""The page, and what it shows of the engine that runs: frames of the pool, and single blocks.

Decides: how often is looked (four times a second, less where a look takes long: looks take a
hundredth of the time at most), who may read texts of others, and what a slow reader misses: it
gets all of the newest look instead. Without a viewer, nothing is sampled, kept or counted.

Texts are shown where all who can ask are one: a single API key, or no key on a server that only
this machine reaches. Text sent with a cache salt is never shown.

Invariants: looks happen between two steps; every reader's frames are, one after the other, the
pool at its last look; what waits for a reader is bounded, and so are the readers.

Does not know: what a frame says (`control/pool_frames.py`), how the page draws it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

import kvcore
from model.async_engine import AsyncEngine, NotServingError
from model.control.pool_frames import Frame, PoolFrames
from model.page import FILES, HEADERS, page_file
from model.serve.config import ServeConfig
from model.serve.errors import ApiError
from model.serve.service import Service

if TYPE_CHECKING:  # torch is not loaded before an engine is made
    from model.control.request import Request as EngineRequest
    from model.engine_core import EngineCore

_PERIOD_S = 0.25
_IDLE_PERIOD_S = 1.0  # between two frames that say the same
_SHARE = 100  # looks take at most 1/_SHARE of the time
_MAX_VIEWERS = 16
_MAX_PENDING = 32  # frames that wait for a reader
_LABEL_TOKENS, _LABEL_LENGTH = 32, 80
_log = logging.getLogger(__name__)
_HIDDEN = "What it holds is not shown."


class _Look(NamedTuple):
    frame: Frame
    whole: Frame | None  # where a viewer needs one
    head: dict[str, object]
    took_s: float


class _Viewer:
    """What waits for one reader; None in place of frames: there will be no more."""

    def __init__(self) -> None:
        self.pending: asyncio.Queue[str | None] = asyncio.Queue(_MAX_PENDING)
        self.needs_whole = True

    def give(self, event: str) -> None:
        """Let an event wait, or where too many do, all of the next look in their place."""
        try:
            self.pending.put_nowait(event)
        except asyncio.QueueFull:
            self.empty()
            self.needs_whole = True

    def end(self) -> None:
        """Let the reader go."""
        self.empty()
        self.pending.put_nowait(None)

    def empty(self) -> None:
        """Forget what waits."""
        while not self.pending.empty():
            self.pending.get_nowait()


class PoolFeed:
    """Looks at an engine while anybody watches, on behalf of all who do.

    Args:
        engine: is looked at between two steps.
        shows_texts: whether requests are called by how their prompts begin.
        period_s: between two looks, at least.
    """

    def __init__(
        self, engine: AsyncEngine, *, shows_texts: bool, period_s: float = _PERIOD_S
    ) -> None:
        self.shows_texts = shows_texts
        self._engine = engine
        self._period_s = period_s
        self._viewers: set[_Viewer] = set()
        self._watch: asyncio.Task[None] | None = None
        self._began_s = self._engine.host.now_s()
        self._frames: PoolFrames | None = None  # these three belong to the engine's thread
        self._looked_at: EngineCore | None = None

    @property
    def num_viewers(self) -> int:
        """How many watch. O(1)."""
        return len(self._viewers)

    def check_room(self) -> None:
        """Raise where too many watch. O(1).

        Raises:
            ApiError: one more may not.
        """
        if len(self._viewers) >= _MAX_VIEWERS:
            raise ApiError(503, f"view: at most {_MAX_VIEWERS} may watch", code="too_many_viewers")

    async def events(self) -> AsyncIterator[str]:
        """Watch, from the first event that is asked for until it is closed."""
        viewer = _Viewer()
        self._viewers.add(viewer)
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_again_and_again())
        try:
            while (event := await viewer.pending.get()) is not None:
                yield event
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._watch is not None:
                self._watch.cancel()
                self._watch = self._frames = self._looked_at = None

    async def _look_again_and_again(self) -> None:
        told_s = 0.0
        try:
            while True:
                needs_whole = any(viewer.needs_whole for viewer in self._viewers)
                look = await self._engine.call(partial(self._look, needs_whole=needs_whole))
                is_due = self._engine.host.now_s() - told_s >= _IDLE_PERIOD_S
                if is_due or look.whole is not None or look.frame.size:
                    told_s = self._engine.host.now_s()
                    await self._tell(look)
                await asyncio.sleep(max(self._period_s, look.took_s * _SHARE))
        except NotServingError:
            pass  # they may come again
        except Exception:  # noqa: BLE001  # it is logged, and the server goes on
            _log.exception("the page failed; this is a bug in kvcore")
        self._watch = self._frames = self._looked_at = None
        for viewer in self._viewers:
            viewer.end()

    async def _tell(self, look: _Look) -> None:
        """Give every reader what it lacks; JSON of a large pool is made on another thread."""
        readers = list(self._viewers)  # who joins meanwhile waits for the next look
        news = await asyncio.to_thread(_event, "frame", look.frame.document())
        whole = ""
        if look.whole is not None:
            head = {**look.head, "shows_texts": self.shows_texts}
            whole = _event("head", head)
            whole += await asyncio.to_thread(_event, "frame", look.whole.document())
        for viewer in readers:
            if viewer.needs_whole and whole:
                viewer.empty()
                viewer.needs_whole = False
                viewer.give(whole)
            elif not viewer.needs_whole:
                viewer.give(news)

    def _look(self, engine: EngineCore, *, needs_whole: bool) -> _Look:
        """Look, on the engine's thread."""
        begin_s = time.perf_counter()
        frames = self._frames
        if frames is None or self._looked_at is not engine:
            frames = PoolFrames(engine.kv, engine, label=self._label if self.shows_texts else None)
            self._frames, self._looked_at = frames, engine
        frame = frames.look(self._engine.host.now_s() - self._began_s)
        whole = frames.whole() if needs_whole else None
        return _Look(frame, whole, frames.head(), time.perf_counter() - begin_s)

    def _label(self, request: EngineRequest) -> str:
        """How a prompt begins, unless it was sent with a cache salt."""
        engine, sequence = self._looked_at, request.sequence
        if engine is None or sequence is None:
            return ""
        first = next((block for block in sequence.tables[0].block_ids if block), 0)
        if not _is_open(kvcore.describe_block(engine.kv, first)):
            return ""
        tokens = request.tokens[: min(_LABEL_TOKENS, request.num_prompt_tokens)]
        return engine.model.codec.decode(tokens.tolist())[:_LABEL_LENGTH]


def live(service: Service, engine: AsyncEngine) -> APIRouter:
    """The routes of the page and of what it shows. O(1)."""
    router = APIRouter(include_in_schema=False)
    feed = PoolFeed(engine, shows_texts=_are_one(service.config))

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return _page_answer("index.html")

    @router.get("/page/source")
    async def source() -> dict[str, str]:
        return {"kind": "live", "model": service.name}

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in FILES:
            raise ApiError(404, "page: there is no such file")
        return _page_answer(name)

    @router.get("/view/frames")
    async def frames() -> Response:
        service.serving()
        feed.check_room()
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=HEADERS)

    @router.get("/view/blocks/{block_id}")
    async def block(block_id: int) -> dict[str, object]:
        service.serving()
        try:
            report, holders = await engine.call(lambda engine: _report(engine, block_id))
        except kvcore.InvalidArgumentError as error:
            raise ApiError(404, str(error), param="block_id") from error
        shown = feed.shows_texts and _is_open(report)
        decode = service.serving().model.codec.decode
        return {
            "state": ("empty", "cached", "held")[report.state],
            "holders": holders,
            "num_holders": report.num_holders,
            "group": report.group,
            "start": report.start,
            "num_tokens": len(report.tokens),
            "pieces": [decode([token]) for token in report.tokens] if shown else [],
            "note": "" if shown or not report.tokens else _HIDDEN,
        }

    return router


def _are_one(config: ServeConfig) -> bool:
    """Whether all who can ask may read each other's texts."""
    if config.api_keys:
        return len(set(config.api_keys)) == 1
    try:
        return ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        return config.host == "localhost"


def _is_open(report: kvcore.BlockReport) -> bool:
    """Whether a block holds what was sent without a salt."""
    return report.namespace is not None and not report.namespace.salt


def _report(engine: EngineCore, block_id: int) -> tuple[kvcore.BlockReport, list[int]]:
    """A block, and the ids of the requests that hold it; on the engine's thread."""
    report = kvcore.describe_block(engine.kv, block_id)
    running = {id(request.sequence): request.request_id for request in engine.running}
    holders = [running[id(seq)] for seq in report.sequences if id(seq) in running]
    return report, holders


def _page_answer(name: str) -> Response:
    kind, content = page_file(name)
    return Response(content, media_type=kind, headers=HEADERS)


def _event(name: str, document: object) -> str:
    """A server-sent event. ASCII, so that no text of a label can end it early."""
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n"
