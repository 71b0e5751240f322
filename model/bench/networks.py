"""The network that a benchmark runs: a checkpoint, or random weights of a configuration.

Decides: what dummy weights are. Speed does not depend on what the weights say, so a benchmark needs
none: the numbers of a configuration are enough, and no hub. Invariants: dummy weights are the same
for the same configuration, dtype and device.

Does not know: requests, engines.
"""

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from model.bench.configs import CONFIGS
from model.errors import UsageError
from model.load.architectures import check_architecture
from model.load.loader import LoadedModel, load_config, load_model, wrap_network
from model.ranks.parallel import Sums, shard_network
from model.ranks.ranks import Ranks

_SEED = 0


class Wordless:
    """A codec of a network without a tokenizer: the text of a token is its number."""

    def encode(self, text: str) -> list[int]:
        """Refuse: there are no words."""
        raise UsageError(f"prompt: wanted token ids, dummy weights have no words; got {text!r}")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Refuse: there are no words."""
        del opens_answer, options
        raise UsageError(f"messages: wanted none, dummy weights have no words; got {messages!r}")

    def decode(self, tokens: Sequence[int]) -> str:
        """The numbers, a space before each. O(tokens)."""
        return "".join(f" {token}" for token in tokens)

    def describe(self) -> None:
        """There is no tokenizer. O(1)."""

    def open_step(self) -> None:
        """No piece changes another, so nothing is kept between them. O(1)."""


def load(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
    *,
    dummy_weights: bool,
) -> LoadedModel:
    """Load a model to be timed.

    Args:
        name: a folder or an id; with `dummy_weights` also a name of `CONFIGS`, and of a folder or
            an id the configuration alone is read.
        device: where the weights go.
        dtype: of the weights.
        ranks: the processes that share the network; drawn weights are whole on each device first.
        dummy_weights: draw the weights instead of loading them.

    Raises:
        UsageError: a name of `CONFIGS` without `dummy_weights`.
        ModelNotFoundError: there is nothing of that name.
        UnsupportedModelError: the architecture cannot run with a paged cache.
    """
    if not dummy_weights:
        if name in CONFIGS:
            raise UsageError(f"--model {name} is a configuration: give --dummy-weights too")
        return load_model(name, device, dtype, ranks)
    config = config_of(name)
    check_architecture(config)
    torch.manual_seed(_SEED)
    with device:
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype
        )
    if ranks is not None:
        shard_network(network, ranks, Sums(dtype, device, ranks))
    return wrap_network(name, network, Wordless(), ranks)


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of a name of `CONFIGS`, a folder or an id. Reads one small file at most.

    Raises:
        ModelNotFoundError: there is nothing of that name.
        UnsupportedModelError: Transformers does not know this kind of model.
    """
    if name not in CONFIGS:
        return load_config(name)
    model_type, numbers = CONFIGS[name]
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **numbers)
    return config
