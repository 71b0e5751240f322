"""What every rank of test_adapters.py runs: `adapters_main.py FOLDER`, a line of JSON from each.

FOLDER has `asked.json`, the names of adapters and prompts in tokens, and for each rank a folder
`rank0`, `rank1`, ... with its files, as machines of their own would have them.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.utils import logging

import backends
import kvcore
from model import EngineConfig, ModelError, SamplingParams, Submission
from model.control.request import Request
from model.engine import Engine, TwinEngine
from model.load.loader import load_model
from model.ranks.parallel import Cut
from model.ranks.ranks import Ranks, join_ranks
from model.tiny import CHECKPOINT_DIR
from tests.model.networks import preempt_in_steps

Tokens = list[list[int]]
BUGS = ("rows of rank 0", "columns of rank 0", "after the sum")


def make(
    ranks: Ranks, change: Callable[[Cut], Cut] = lambda cut: cut, **sizes: object
) -> TwinEngine:
    backend = backends.get_backend("numba")
    model = load_model(str(CHECKPOINT_DIR), backend.device, None, ranks)
    cuts = {path: change(cut) for path, cut in model.cuts.items()}
    config = EngineConfig(block_size=4, **sizes)
    return TwinEngine(replace(model, cuts=cuts), backend, config, is_checked=True)


def submit(engine: Engine, prompt: list[int], name: str | None) -> Request:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    asked = Submission(prompt, params, namespace=kvcore.Namespace(lora_name=name))
    return engine.submit(asked)[0]


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def tokens(engine: Engine, prompts: Tokens, names: list[str | None]) -> list[Tokens]:
    """Those of all prompts with all adapters, at once."""
    requests = [[submit(engine, prompt, name) for prompt in prompts] for name in names]
    finish(engine)
    return [[one.output_tokens for one in those] for those in requests]


def on_all(engine: TwinEngine, use: Callable[[], object]) -> object:
    """What rank 0 does, which the others follow; None there."""
    if not engine.leads:
        engine.follow()
        return None
    found = use()
    engine.end(goes_on=True)
    return found


def mixed(ranks: Ranks, prompts: Tokens, names: list[str | None]) -> object:
    """Adapters from the start, chunked prompts and preemption; twice, so that prefixes hit."""
    lora = tuple(f"{name}={name}" for name in names if name)
    engine = make(ranks, lora=lora, max_num_batched_tokens=7, num_blocks=40, compile=True)
    how = engine.prepare()
    preempt_in_steps(engine, {6, 9, 14})
    found = on_all(engine, lambda: [tokens(engine, prompts, names) for _ in range(2)])
    stats = engine.stats
    return {
        "tokens": found,
        "how": how,
        "hits": stats.num_hit_tokens,
        "preemptions": stats.num_preemptions,
    }


def planted(ranks: Ranks, prompts: Tokens, names: list[str | None], bug: str) -> object:
    lora = tuple(f"{name}={name}" for name in names if name)

    def first(cut: Cut) -> Cut:
        def of_rank_0(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
            own_down, own_up = cut(down, up)
            if bug == "rows of rank 0":
                return own_down, up[: len(own_up)]
            return down[:, : own_down.shape[1]], own_up

        return of_rank_0

    patch: AbstractContextManager[object] = nullcontext()
    register = nn.Module.register_forward_hook
    if bug == "after the sum":
        patch = mock.patch.object(
            nn.Module, "register_forward_hook", lambda layer, hook, **_: register(layer, hook)
        )
    with patch:
        engine = make(ranks, first if "of rank 0" in bug else lambda cut: cut, lora=lora)
    return on_all(engine, lambda: tokens(engine, prompts, names))


def attempt(engine: TwinEngine, text: str) -> str:
    """Add an adapter on all ranks; the error, or "added"."""
    try:
        engine.add_adapter(engine.read_adapter(text))
    except ModelError as error:
        return str(error)
    return "added"


def while_running(ranks: Ranks, prompts: Tokens) -> object:
    """Adapters that come, fail and go between the steps of others."""
    engine = make(ranks, max_loras=2)

    def use() -> object:
        plain = [submit(engine, prompt, None) for prompt in prompts]
        engine.step()
        said: dict[str, str] = {}
        for name in ("missing", "torn", "other", "nowhere"):
            said[name] = attempt(engine, f"{name}={name}")
            engine.step()
        said["left"] = str(engine.adapter_names)
        said["sql"] = attempt(engine, "sql=attention")
        first = [submit(engine, prompt, "sql") for prompt in prompts]
        engine.step()
        engine.remove_adapter("sql")
        said["again"] = attempt(engine, "sql=all")  # of the same name, with other weights
        said["full"] = attempt(engine, "more=all")
        second = [submit(engine, prompt, "sql") for prompt in prompts]
        finish(engine)
        said["room"] = attempt(engine, "more=attention")
        third = tokens(engine, prompts, ["more"])
        found = [[one.output_tokens for one in those] for those in (plain, first, second)]
        return {"said": said, "tokens": [*found, *third]}

    return {"found": on_all(engine, use), "versions": engine.adapter_versions}


def kept(ranks: Ranks) -> object:
    """A planted bug: what could be added stays where another rank has failed."""
    engine = make(ranks, max_loras=2)
    with mock.patch.object(Engine, "remove_adapter"):
        on_all(engine, lambda: attempt(engine, "missing=missing"))
    return engine.adapter_versions


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    asked: Mapping[str, list[object]] = json.loads((place / "asked.json").read_text())
    ranks = join_ranks(int(os.environ["WORLD_SIZE"]))
    os.chdir(place / f"rank{ranks.rank}")
    prompts, names = asked["prompts"], asked["names"]
    found = {
        "rank": ranks.rank,
        "mixed": mixed(ranks, prompts, names),
        "planted": {bug: planted(ranks, prompts, names, bug) for bug in BUGS},
        "while_running": while_running(ranks, prompts),
        "kept": kept(ranks),
    }
    sys.stdout.write(f"{json.dumps(found)}\n")  # in one go: all ranks write there
    sys.stdout.flush()
    ranks.leave()


if __name__ == "__main__":
    main()
