"""What every rank of test_ranks.py runs: `ranks_main.py SCENARIO [CONFIG/VARIANT...]`.

- `walk`: cut each configuration, and print how its logits compare with the whole network's, both
  without a LoRA adapter and with one beside all linear layers.
- `experts`: the same, but for experts, which stay whole, each on one rank.
- `diverge`: one rank's manager is tampered with; the comparison must say so.
- `die`: one rank leaves in the middle; the others must notice.
- `serve STAGE`: a server of two ranks; one leaves while it loads, makes its engine or steps.
- `odd`: one rank has other logits and less memory; all must take rank 0's tokens and the fewest
  blocks, and keep no request that has ended.
"""

import gc
import json
import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

import backends
from model import EngineConfig, SamplingParams
from model.control.request import Request
from model.control.submission import Submission
from model.engine import Engine, TwinEngine
from model.engine_core import Output
from model.errors import RankLostError, RanksDivergedError, UnsupportedModelError
from model.forward.lora import Adapter, Adapters
from model.load import loader
from model.load.architectures import auto_class
from model.load.loader import load_model
from model.ranks.parallel import Cut, Sums, check_cut, shard_network
from model.ranks.ranks import Ranks, join_ranks
from model.tiny import CHECKPOINT_DIR
from tests.model.networks import random_adapter
from tests.model.tiny_configs import cases, make_config


def say(line: str) -> None:
    """Write a line in one go: all ranks write there, and `print` writes its end apart."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def walk(ranks: Ranks, names: list[str]) -> None:
    """Print `{"config/variant": outcome}`: "equal", "refused: ..." or what else came."""
    outcomes = {}
    for name, variant in cases():
        if f"{name}/{variant}" in names:
            outcomes[f"{name}/{variant}"] = _outcome(ranks, name, variant)
    if ranks.leads:
        say(json.dumps(outcomes))


def _logits(
    network: PreTrainedModel, tokens: Tensor, adapter: Adapter, cuts: Mapping[str, Cut]
) -> tuple[Tensor, ...]:
    """Those without the adapter, and with it if the network can have one."""
    adapters = None
    with suppress(UnsupportedModelError):
        adapters = Adapters(network, 1, 3, None, cuts)
    network.set_attn_implementation("eager")  # else a probe has left ours
    plain = network(tokens, use_cache=False).logits
    if adapters is None:
        return (plain,)
    own = {path: one for path, one in adapter.products.items() if path in adapters._halves}
    adapters.add(replace(adapter, products=own).cut(cuts))
    with adapters.choosing(torch.tensor([0])):
        return plain, network(tokens, use_cache=False).logits


def _outcome(ranks: Ranks, name: str, variant: str) -> str:
    torch.manual_seed(0)
    config = make_config(name, variant)
    network = auto_class(config).from_config(config, attn_implementation="eager").eval()
    tokens = torch.arange(1, 21)[None] * 7 % 300
    adapter = random_adapter(network, "random", 3, size=0.1)
    before = sum(parameter.numel() for parameter in network.parameters())
    with torch.no_grad():
        try:
            network(tokens, use_cache=False)
        except TypeError as error:
            return f"not dense: {error}"  # without a mask it does not even run whole
        wanted = _logits(network, tokens, adapter, {})
        try:
            cuts = shard_network(network, ranks, Sums(network.dtype, network.device, ranks))
            check_cut(network, ranks)
        except UnsupportedModelError as error:
            return f"refused: {error}"
        got = _logits(network, tokens, adapter, cuts)
    after = sum(parameter.numel() for parameter in network.parameters())
    if after >= before:
        return f"{after} parameters of {before} are left"
    if len(wanted) == 2 and torch.equal(*wanted):
        return "the adapter changes nothing"
    names = ("logits", "adapted logits")[: len(wanted)]
    for what, mine, whole in zip(names, got, wanted, strict=True):
        if len(set(ranks.all_gather(mine.numpy().tobytes()))) != 1:
            return f"the ranks have different {what}"
        error = float((mine - whole).abs().max() / whole.abs().max())
        if not error < 5e-5:
            return f"{what}: differ by {error:.1e}"
    return "equal"


def _engine(ranks: Ranks, *, is_checked: bool, num_blocks: int = 40) -> TwinEngine:
    backend = backends.get_backend("numba")
    model = load_model(str(CHECKPOINT_DIR), backend.device, None, ranks)
    config = EngineConfig(num_blocks=num_blocks)
    return TwinEngine(model, backend, config, is_checked=is_checked)


def diverge(ranks: Ranks) -> None:
    engine = _engine(ranks, is_checked=True)
    if ranks.rank == 1:
        stolen = engine.kv.open(range(7))
        engine.kv.reserve(stolen, 7)  # a block that the other ranks hand out next
    try:
        if ranks.leads:
            engine.generate([list(range(20))], SamplingParams(max_tokens=2))
        else:
            engine.follow()
    except RanksDivergedError as error:
        say(f"rank {ranks.rank}: {error}")


def die(ranks: Ranks) -> None:
    engine = _engine(ranks, is_checked=False)
    try:
        if ranks.leads:
            engine.generate([list(range(20))], SamplingParams(max_tokens=100, ignore_eos=True))
        else:
            left = iter(range(5))
            step = engine._step
            engine._step = lambda: os._exit(0) if next(left, None) is None else step()
            engine.follow()
    except RankLostError as error:
        say(f"rank {ranks.rank}: {error}")
        os._exit(0)  # what waits for the other rank must not wait


def serve(stage: str) -> None:
    if os.environ["RANK"] == "1":
        left = iter(range(0 if stage != "step" else 6))

        def leave_then(do):
            return lambda *given: os._exit(9) if next(left, None) is None else do(*given)

        if stage == "load":
            loader._load_network = leave_then(None)
        elif stage == "engine":
            Engine.__init__ = leave_then(None)
        else:
            Engine._run_step = leave_then(Engine._run_step)
    sys.argv = ["model.serve", "--tp", "2", "--port", "0", "--num-blocks", "40"]
    runpy.run_module("model.serve", run_name="__main__")


def odd(ranks: Ranks) -> None:
    engine = _engine(ranks, is_checked=True, num_blocks=40 - 9 * ranks.rank)
    if not ranks.leads:  # the least likely token becomes the most likely one
        head = engine.model.network.get_output_embeddings()
        head.register_forward_hook(lambda _module, _inputs, logits: -logits)
    tokens: dict[int, list[int]] = {}
    step = engine._step

    def listened() -> list[Output]:
        outputs = step()
        for output in outputs:
            tokens.setdefault(output.request.request_id, []).extend(output.token_ids)
        return outputs

    engine._step = listened
    if ranks.leads:
        for number in range(3):
            params = SamplingParams(max_tokens=12, temperature=0.5 * number, seed=7)
            engine.submit(Submission(list(range(20)), replace(params, n=2)))
            engine.submit(Submission([5] * 9, params))
            left = engine.submit(Submission([6] * 9, params))
            engine.step()
            engine.abort(left[0])
            while engine.has_unfinished:
                engine.step()
        del left
        engine.end()
    else:
        engine.follow()
    gc.collect()
    kept = sum(type(each) is Request for each in gc.get_objects())
    found = {"num_blocks": engine.kv.num_blocks, "tokens": tokens}
    say(json.dumps({"rank": ranks.rank, "kept": kept, **found}))


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    ranks = join_ranks(int(os.environ["WORLD_SIZE"]), expert_parallel=sys.argv[1] == "experts")
    if sys.argv[1] in {"walk", "experts"}:
        walk(ranks, sys.argv[2:])
    else:
        {"diverge": diverge, "die": die, "odd": odd}[sys.argv[1]](ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
