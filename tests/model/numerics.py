"""How far logits in bfloat16 are from those in float32: the paged ones, and the dense ones."""

import torch

from model import EngineConfig, SamplingParams
from model.engine import Engine
from model.load.loader import wrap_network
from tests.model.networks import build


def bfloat16_errors(architecture, backend, prompts, num_tokens=8):
    """The largest differences from a dense pass in float32, of a paged run and of a dense pass.

    Every prompt is continued by the paged run's own tokens, in small chunks, so that prefills,
    cached prefixes and decodes are all among the logits compared.
    """
    exact, rounded = (build(architecture) for _ in range(2))
    rounded = wrap_network(
        architecture, rounded.network.to(backend.device, torch.bfloat16), rounded.codec
    )
    config = EngineConfig(
        num_blocks=100, block_size=4, max_num_batched_tokens=11, async_scheduling=False
    )
    engine = Engine(rounded, backend, config)
    runs, paged = continued(engine, prompts, num_tokens)
    rounded.network.set_attn_implementation(rounded.dense_implementation)
    wanted = torch.cat([dense(exact, *run) for run in runs])
    dense_logits = torch.cat([dense(rounded, *run) for run in runs])
    assert paged.shape == wanted.shape
    return tuple(float((logits - wanted).abs().max()) for logits in (paged, dense_logits))


def continued(engine, prompts, num_tokens):
    """Run the engine; each request's (prompt length, tokens), and the logits of all outputs."""
    passes = []
    forward = engine.network.logits

    def recorded(step):
        passes.append(forward(step))
        return passes[-1]

    engine.network.logits = recorded
    rows = {}
    requests = engine.add_all(prompts, SamplingParams(max_tokens=num_tokens))
    while engine.has_unfinished:
        outputs = engine.step()
        for output, row in zip(outputs, passes.pop().float().cpu(), strict=True):
            rows.setdefault(output.request.request_id, []).append(row)
    runs = [(request.num_prompt_tokens, list(request.tokens)) for request in requests]
    return runs, torch.cat([torch.stack(rows[request.request_id]) for request in requests])


def dense(model, num_prompt_tokens, tokens):
    """The logits that a dense pass over a whole text gives for its output tokens."""
    network = model.network
    with torch.inference_mode():
        logits = network(torch.tensor([tokens[:-1]], device=network.device), use_cache=False).logits
    return logits[0, num_prompt_tokens - 1 :].float().cpu()
