"""What every rank of test_ranks.py runs: `ranks_main.py SCENARIO [CONFIG/VARIANT...]`.

- `walk`: cut each configuration, and print how its logits compare with the whole network's, both
  without a LoRA adapter and with one beside all linear layers.
- `experts`: the same, but for experts, which stay whole, each on one rank.
- `diverge`: one rank's manager is tampered with; the comparison must say so.
- `die`: one rank leaves in the middle; the others must notice.
- `serve STAGE`: a server of two ranks; one leaves while it loads, makes its engine or steps, or
  while rank 0 waits without end, as it does for a GPU.
- `odd`: one rank has other logits and less memory; all must take rank 0's tokens and the fewest
  blocks, and keep no request that has ended.
- `many KIND...` and `many-experts KIND...`: the networks of `cut_networks.py`, with everything that
  an engine has at once, against one process; `many planted`: the last rank has another one's part.
- `tiers FOLDER KIND...`: an engine after another, with host memory and a disk, and what goes wrong
  on rank 1 alone.
"""

import errno
import gc
import json
import os
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

import backends
import kvcore
from kvcore.tiers import Folder
from kvcore.tiers.record import RECORD_BYTES, SEGMENT_BYTES, decode_header
from model import EngineConfig, SamplingParams
from model.caches.tiers import PooledBlocks
from model.control.request import Request
from model.control.submission import Submission
from model.control.tier_transfers import TierTransfers, TransferCosts
from model.engine import Engine, TwinEngine
from model.engine_core import Output
from model.errors import RankLostError, RanksDivergedError, UnsupportedModelError
from model.forward.lora import Adapter, Adapters
from model.load import loader
from model.load.architectures import auto_class
from model.load.loader import LoadedModel, load_model
from model.ranks.parallel import Cut, Sums, check_cut, shard_network
from model.ranks.ranks import Ranks, join_ranks
from model.tiny import CHECKPOINT_DIR
from tests.model.networks import random_adapter
from tests.model.ranks import cut_networks
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
            cuts = shard_network(network, ranks, Sums(network.device, ranks))
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


def _engine(ranks: Ranks, *, is_checked: bool, num_blocks: int = 40, **sizes: object) -> TwinEngine:
    backend = backends.get_backend("numba")
    model = load_model(str(CHECKPOINT_DIR), backend.device, None, ranks)
    config = EngineConfig(num_blocks=num_blocks, **sizes)
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


def many(ranks: Ranks, kinds: list[str]) -> None:
    """Print `{"KIND": how the ranks differ from one process, and what they used}`."""
    device, found = torch.device("cpu"), {}
    with ExitStack() as stack:
        if kinds == ["planted"]:
            kinds, shard = ["repeated heads"], shard_network
            wrong = replace(ranks, rank=min(ranks.rank, ranks.size - 2))
            stack.enter_context(
                mock.patch.object(
                    cut_networks, "shard_network", lambda one, _, sums: shard(one, wrong, sums)
                )
            )
        for number, kind in enumerate(kinds):
            load_it, drafts = partial(cut_networks.load, kind, device), (number % 2 == 0,)
            [found[kind]] = cut_networks.one_and_many(load_it, ranks, 4, drafts=drafts)
    if ranks.leads:
        say(json.dumps(found))


def serve(stage: str) -> None:
    if os.environ["RANK"] == "0" and stage == "stuck":
        run, number = Engine._run_step, iter(range(6))

        def stuck(engine: Engine) -> list[Output]:
            if next(number, None) is None:
                threading.Event().wait()
            return run(engine)

        Engine._run_step = stuck
    if os.environ["RANK"] == "1":
        left = iter(range(6 if stage in {"step", "stuck"} else 0))

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


def _turns() -> list[list[int]]:
    """Agents in turn, each with a context of its own that grows: several times the pool."""
    return [
        [(5 * agent + place) % 90 + 5 for place in range(60 + 45 * turn)]
        for turn in range(3)
        for agent in range(6)
    ]


def _corrupt(folder: Path) -> None:
    """Change a byte of each record: its header, and what is found, stay as they are."""
    for path in folder.glob("kvcore-tier/*.kvseg"):
        data, offset = bytearray(path.read_bytes()), SEGMENT_BYTES
        while offset < len(data):
            data[offset + RECORD_BYTES] ^= 1
            header = decode_header(bytes(data[offset : offset + RECORD_BYTES]))
            offset += RECORD_BYTES + header.length
        path.write_bytes(data)


def _fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "injected")


_open_tiers = Engine._open_tiers


def _change_weights(engine: Engine, model: LoadedModel, kv: kvcore.KVCacheManager) -> TierTransfers:
    """Before its tiers are opened one rank has other weights, in a part that is its own."""
    with torch.inference_mode():
        model.network.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    return _open_tiers(engine, model, kv)


def _faults(kind: str, rank: int) -> Iterator[tuple[object, str, object]]:
    """What to patch: loads are tried and waited for, and some things go wrong."""
    yield TransferCosts, "is_worth", lambda *_: True
    yield TransferCosts, "deadline_s", lambda *_: 0.05 if kind == "slow" else 60.0
    if kind == "alone":
        yield TierTransfers, "_agreed", lambda _, told: told
    if rank == 1 and kind == "slow":
        yield PooledBlocks, "load", lambda *_: threading.Event().wait(60)
    if rank == 1 and kind == "full":
        yield Folder, "write", _fail
    if rank == 1 and kind == "other":
        yield Engine, "_open_tiers", _change_weights


def tiers(ranks: Ranks, folder: str, kinds: list[str]) -> None:
    """Run the same prompts on an engine of each kind, and print what came of it."""
    for kind in kinds:
        if ranks.rank == 1 and kind in {"corrupted", "alone"}:
            _corrupt(Path(folder, "rank-1"))
        sizes: dict[str, object] = {"disk": folder, "host_memory_bytes": 1 << 20}
        if kind == "full":
            sizes["disk"] = f"{folder}-full"
        found: dict[str, object] = {"rank": ranks.rank, "kind": kind}
        with ExitStack() as stack:
            for patch in _faults(kind, ranks.rank):
                stack.enter_context(mock.patch.object(*patch))
            engine = _engine(ranks, is_checked=True, **({} if kind == "none" else sizes))
            try:
                found["tokens"] = _run_turns(engine)
            except RanksDivergedError as error:
                found["error"] = str(error)
        if engine.tiers is not None:
            found |= asdict(engine.tiers.stats)
            found["faults"] = sum(tier.stats.faults.total() for tier in engine.tiers.tiers.tiers)
        say(json.dumps(found))


def _run_turns(engine: TwinEngine) -> list[list[int]]:
    """The tokens of each prompt, on rank 0; each is stored before the next one comes."""
    if not engine.leads:
        engine.follow()
        return []
    tokens = []
    for prompt in _turns():
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        [done] = engine.generate([prompt], params)
        tokens.append(list(done.request.output_tokens))
        while engine.tiers is not None and engine.tiers.is_busy:
            engine.tiers.wait()
            engine.tend()
    engine.end(goes_on=True)
    return tokens


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    is_whole = sys.argv[1] in {"experts", "many-experts"}
    ranks = join_ranks(int(os.environ["WORLD_SIZE"]), expert_parallel=is_whole)
    if sys.argv[1] in {"walk", "experts"}:
        walk(ranks, sys.argv[2:])
    elif sys.argv[1].startswith("many"):
        many(ranks, sys.argv[2:])
    elif sys.argv[1] == "tiers":
        tiers(ranks, sys.argv[2], sys.argv[3:])
    else:
        {"diverge": diverge, "die": die, "odd": odd}[sys.argv[1]](ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
