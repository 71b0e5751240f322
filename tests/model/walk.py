"""A walk over every decoder of Transformers: what runs equals `generate`, the rest is refused.

Each case runs in a forked process with a limit of time and of memory. `python -m tests.model.walk`
prints an outcome a line, for the configurations that are named or for all; with `--write` it stores
what all came to in `architectures.json`, which docs/reference/architectures.md shows.
"""

import argparse
import copy
import json
import multiprocessing
import os
import re
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

import backends
from model import EngineConfig, ModelError, SamplingParams
from model.engine import Engine
from model.load.architectures import auto_class, check_architecture, check_layers
from model.load.loader import LoadedModel, wrap_network
from tests.model.networks import ByteCodec, KnowingDrafter, greedy_logits, preempt_in_steps
from tests.model.prompts import NUM_SHARED, NUM_TOKENS, prompts
from tests.model.tiny_configs import cases, lowered, make_config

DATA = Path(__file__).with_name("architectures.json")
TABLES = "## Served"
SECONDS = 120
MEMORY_BYTES = 8 << 30
CLEAR = 2e-4
NEAR = 1e-3
SEEDS = 6


def outcome(name: str, variant: str) -> str:
    """What becomes of a case: "equal", "refused: ..." or what is wrong."""
    try:
        config = make_config(name, variant)
        check_architecture(config)
        check_layers(config)
        found = compare(partial(build_network, config), SIZES)
        low = lowered(config)
        if found != "equal" or low is None:
            return found
        return compare(partial(build_network, low), SIZES[1:2])
    except ModelError as error:
        text = str(error)
        return f"refused: {text}" if "\n" not in text else f"WRONG: not one line: {text!r}"


def compare(
    build: Callable[[int], LoadedModel], choices: Sequence[dict[str, Any]], near: float = NEAR
) -> str:
    """What engines make of the network of the first seed whose texts are clear, as `outcome`."""
    reason = ""
    for seed in range(SEEDS):
        model = build(seed)
        # A network that cannot run is refused before anything is computed.
        engines = [engine_of(model, **sizes) for sizes in choices]
        try:
            dense = [greedy_logits(model, prompt, NUM_TOKENS) for prompt in prompts()]
        except Exception as error:  # noqa: BLE001  # the yardstick is what fails
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"WRONG: generate itself fails: {error!r} {where.filename}:{where.lineno}"
        tokens = [tokens for tokens, _ in dense]
        if len({tuple(own) for own in tokens}) < len(tokens):
            reason = "WRONG: two prompts give the same tokens: the comparison would see nothing"
            continue
        best = torch.stack([logits.topk(2).values for _, logits in dense])
        if float((best[..., 0] - best[..., 1]).min()) < CLEAR:
            reason = "WRONG: no clear network found"
            continue
        wanted = torch.stack([logits.log_softmax(-1).amax(-1) for _, logits in dense])
        for engine in engines:
            got, logprobs = run(engine)
            if got != tokens:
                return f"WRONG: {tokens} became {got}"
            error = float((torch.tensor(logprobs) - wanted).abs().max())
            if error > near:
                return f"WRONG: log-probabilities are off by {error:.1e}"
        if engines[0].network.layout.states and len(engines) > 1:
            engine = engine_of(model, num_blocks=90, drafts="ngram")
            texts = [(*prompt, *own) for prompt, own in zip(prompts(), tokens, strict=True)]
            engine._scheduler._drafter = KnowingDrafter(texts)
            if run(engine)[0] != tokens or not engine.stats.num_accepted_tokens:
                return "WRONG: draft tokens change what is said, or none was accepted"
        return "equal"
    return reason


SIZES: tuple[dict[str, Any], ...] = (
    {"num_blocks": 90},
    {"num_blocks": 90, "max_num_batched_tokens": 11, "swap_memory_bytes": 0},
    {
        "num_blocks": 90,
        "max_num_batched_tokens": 11,
        "swap_memory_bytes": 1 << 22,
        "enable_prefix_caching": False,
    },
)


def engine_of(model: LoadedModel, **sizes: Any) -> Engine:
    """An engine with blocks of 4."""
    return Engine(model, backends.get_backend("numba"), EngineConfig(block_size=4, **sizes))


def run(engine: Engine) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens of the four prompts and their log-probabilities.

    Requests are preempted on the way where steps are small.
    """
    is_chunked = engine.config.max_num_batched_tokens < 64
    if is_chunked:
        preempt_in_steps(engine, {6, 14, 15, 19})
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    done = engine.generate(prompts(), params)
    if is_chunked and not engine.stats.num_preemptions:
        raise AssertionError("nothing was preempted")
    # Blocks that two prompts begin with: of all groups.
    has_common = engine.kv.pool.common_size <= NUM_SHARED
    if engine.kv.enable_caching and has_common and not engine.stats.num_hit_tokens:
        raise AssertionError("nothing was hit")
    if is_chunked and engine.num_host_blocks and not engine.stats.num_loads:
        raise AssertionError("nothing was swapped")
    if engine.kv.num_free_blocks != engine.kv.num_usable_blocks:
        raise AssertionError("a block was lost")
    tokens = [one.request.output_tokens for one in done]
    return tokens, [[token.logprob or 0.0 for token in one.tokens] for one in done]


def build_network(config: Any, seed: int) -> LoadedModel:
    """A random network in float32."""
    torch.manual_seed(seed)
    own = copy.deepcopy(config)  # a network writes into it
    network = auto_class(config).from_config(own, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("sinks"):  # they begin at nothing that shows
                parameter.normal_(std=2.0)
    network.generation_config.eos_token_id = None
    return wrap_network(type(config).__name__, network, ByteCodec())


def limited(name: str, variant: str) -> str:
    """The outcome, found in a process of its own that cannot take more than its share."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        try:
            signal.alarm(SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            try:
                there.send(outcome(name, variant))
            except BaseException as error:  # noqa: BLE001
                frames = traceback.extract_tb(error.__traceback__)
                where = "; ".join(f"{f.filename}:{f.lineno}" for f in frames[-3:])
                there.send(f"WRONG: {error!r} at {where}")
        finally:
            os._exit(0)
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = f"WRONG: no answer in {SECONDS} s"
    os.waitpid(process, 0)
    return str(found)


def stored() -> dict[tuple[str, str], str]:
    """The outcomes as they were stored last."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))["outcomes"]
    return {(name, variant): found for name, variant, found in rows}


def stored_for() -> str:
    """The version of Transformers that was walked."""
    return str(json.loads(DATA.read_text(encoding="utf-8"))["transformers"])


def store(found: dict[tuple[str, str], str]) -> None:
    """Store outcomes; docs/reference/architectures.md shows them."""
    rows = [[*case, outcome] for case, outcome in sorted(found.items())]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    version = json.dumps(transformers.__version__)
    text = f'{{"transformers": {version}, "outcomes": [\n{lines}\n]}}\n'
    DATA.write_text(text, encoding="utf-8")


def tables(found: dict[tuple[str, str], str]) -> str:
    """The page from its tables on."""
    served: dict[str, list[str]] = {}
    refused: dict[str, dict[str, list[str]]] = {}
    for (name, variant), outcome in sorted(found.items()):
        if outcome == "equal":
            served.setdefault(name, []).append(variant)
        else:
            reason = re.sub(r"^refused: (\w+: )?", "", outcome)
            refused.setdefault(name, {}).setdefault(reason, []).append(variant)
    lines = [TABLES, "", f"{len(served)} of {len({name for name, _ in found})} kinds.", ""]
    lines += ["| configuration | variants |", "|---|---|"]
    lines += [f"| {_kind(name)} | {_variants(those)} |" for name, those in served.items()]
    lines += ["", "## Refused", "", "| configuration | variants | reason |", "|---|---|---|"]
    for name, reasons in refused.items():
        for reason, those in reasons.items():
            lines.append(f"| {_kind(name)} | {_variants(those)} | {reason} |")
    return "\n".join(lines) + "\n"


def _kind(name: str) -> str:
    return f"`{name.removesuffix('Config')}`"


def _variants(those: list[str]) -> str:
    return ", ".join(variant or "plain" for variant in those) if any(those) else ""


def main() -> None:
    """Walk, print, and store if that is wanted."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.walk")
    parser.add_argument("names", nargs="*", help="configurations; none: all")
    parser.add_argument("--write", action="store_true", help="store the outcomes")
    options = parser.parse_args()
    quieten()
    found = {}
    for name, variant in cases():
        if not options.names or name in options.names:
            found[name, variant] = limited(name, variant)
            print(f"{name} {variant}: {found[name, variant]}", flush=True)  # noqa: T201
    wrong = [case for case, outcome in found.items() if outcome.startswith("WRONG")]
    if wrong:
        raise SystemExit(f"wrong: {wrong}")
    if options.write:
        store(stored() | found if options.names else found)


def quieten() -> None:
    """No warnings, no second thread, nothing about progress."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
