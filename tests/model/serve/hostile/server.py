"""The server of the command line, with a route that counts what is left, and bugs that are named.

Where its event loop or its engine does not come round for `LAG_S`, its log says what runs then.

`python -m tests.model.serve.hostile.server --port 8000`; `$HOSTILE_PLANTS` names bugs.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from model.cli.exits import leaves
from model.serve import process
from model.serve.args import parse_args
from model.serve.listener import listen
from model.serve.service import Service

LAG_S = 0.05
create_app = process.create_app


def watch(what, beat):
    """Say where all threads are while something does not come round; on a thread of its own.

    Args:
        what: the event loop, or the engine.
        beat: asks it to set an event.
    """
    while True:
        came = threading.Event()
        began_s, spent_s = time.monotonic(), time.process_time()
        beat(came)
        if not came.wait(LAG_S):
            names = {one.ident: one.name for one in threading.enumerate()}
            where = "; ".join(
                f"{names.get(ident)}: {_place(frame)}"
                for ident, frame in sys._current_frames().items()
                if ident != threading.get_ident()
            )
            came.wait()
            took_s, worked_s = time.monotonic() - began_s, time.process_time() - spent_s
            told = f"{what} for {took_s:.3f} s, {worked_s:.3f} s of processors, in {where}"
            sys.stderr.write(f"lag: {told}\n")
        threading.Event().wait(LAG_S / 5)


def begin_to_watch(engine):
    """Watch the running loop and an engine."""
    loop = asyncio.get_running_loop()

    def ask_engine(came):
        asyncio.run_coroutine_threadsafe(engine.call(lambda _: came.set()), loop)

    beats = {"event loop": lambda came: loop.call_soon_threadsafe(came.set), "engine": ask_engine}
    for what, beat in beats.items():
        threading.Thread(target=watch, args=[what, beat], name=f"watch {what}", daemon=True).start()


def _place(frame):
    """Where a thread is, unless it waits in the usual places."""
    stack = traceback.extract_stack(frame)[-5:]
    if stack[-1].name in {"wait", "_worker", "get"}:
        return "waits"
    return " < ".join(
        f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in reversed(stack)
    )


def counting(engine, config, **more):
    """The application, and `GET /left`."""
    app, is_watched = create_app(engine, config, **more), []

    @app.get("/left")
    async def left():
        if not is_watched:
            is_watched.append(begin_to_watch(engine))

        def held(core):
            stats = core.kv.stats()
            return {"blocks": stats.num_used_blocks, "seats": len(core.running),
                    "waiting": len(core.waiting)}  # fmt: skip

        counts = await engine.call(held)
        health = engine.health
        return counts | {
            "streams": engine.num_open, "tasks": len(asyncio.all_tasks()),
            "faults": health.num_faults, "ready": health.is_ready,
        }  # fmt: skip

    for name in filter(None, os.environ.get("HOSTILE_PLANTS", "").split(",")):
        PLANTS[name](engine)
    return app


def _unknown(do):
    """Do something for each request that names an unknown model."""
    check = Service.check_model

    def checked(self, name):
        if name is not None and name not in self.names:
            do()
        check(self, name)

    Service.check_model = checked


def _raises():
    raise KeyError("planted")


def _burns():
    end_s = time.thread_time() + 0.3
    while time.thread_time() < end_s:
        pass


def _grows():
    if len(GROWN) < 5:
        GROWN.append(b"x" * (300 << 20))


def _opened(core):
    sequence = core.kv.open(range(40))
    core.kv.reserve(sequence, 40)


GROWN, KEPT = [], []
PLANTS = {
    "raises": lambda _: _unknown(_raises),
    "blocks": lambda _: _unknown(lambda: time.sleep(0.3)),
    "burns": lambda _: _unknown(_burns),
    "grows": lambda _: _unknown(_grows),
    "keeps blocks": lambda engine: _unknown(
        lambda: KEPT.append(asyncio.ensure_future(engine.call(_opened)))
    ),
    "keeps tasks": lambda _: _unknown(lambda: KEPT.append(asyncio.ensure_future(_endless()))),
}


async def _endless():
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


if __name__ == "__main__":
    process.create_app = counting
    with leaves():
        options = parse_args()
        raise SystemExit(process.serve(options, listen(options.serve), threading.Event()))
