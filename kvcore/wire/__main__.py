"""`python -m kvcore.wire ENDPOINT [REPLAY]`: follow a publisher and say what it holds."""

from __future__ import annotations

import argparse
import sys
import time

from kvcore.wire.errors import EndpointError
from kvcore.wire.subscriber import Source, Subscriber


def main(arguments: list[str] | None = None) -> int:
    """Follow until interrupted, or for some lines; 2 if the address is none."""
    options = _parser().parse_args(arguments)
    source = Source(options.endpoint, options.replay, options.topic)
    try:
        with Subscriber({"publisher": source}) as subscriber:
            count, was_heard = 0, False
            while not options.lines or count < options.lines:
                count += 1
                time.sleep(options.every)
                was_heard = _say(subscriber, options.endpoint)
            return 0 if was_heard else 1
    except EndpointError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.wire",
        description="Follow a publisher of KV events (kvcore, vLLM, SGLang) and say what it holds.",
    )
    parser.add_argument("endpoint", help="where it publishes, such as tcp://127.0.0.1:5557")
    parser.add_argument("replay", nargs="?", help="where it answers requests for what was missed")
    parser.add_argument("--topic", default="", help="what its topics begin with")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds a line")
    parser.add_argument(
        "--lines",
        type=int,
        default=0,
        help="seconds to run, then exit with 1 if nothing was received; 0: no limit",
    )
    return parser


def _say(subscriber: Subscriber, endpoint: str) -> bool:
    """Write one line; whether the publisher has ever been heard."""
    status = subscriber.status()["publisher"]
    met, held = status.met, subscriber.index.stats()
    if not status.was_heard:
        sys.stdout.write(f"nothing heard from {endpoint} for {status.silent_s:.1f} s\n")
        sys.stdout.flush()
        return False
    known = "known" if status.is_known else "unknown"
    sys.stdout.write(
        f"{known}, silent for {status.silent_s:.1f} s: {held.num_held} contents; "
        f"{met.num_batches} batches, {met.num_gaps} gaps, {met.num_lost} lost, "
        f"{met.num_restarts} restarts, {met.num_malformed} malformed, {met.num_failed} failed, "
        f"{held.num_orphans} orphans, {held.num_passed_over} passed over\n"
    )
    sys.stdout.flush()
    return True


if __name__ == "__main__":
    raise SystemExit(main())
