"""The sampling values that a model's generation_config.json recommends.

Decides: which of its fields are defaults of requests: those that vLLM takes. Its token ids end
texts whatever is chosen here (`loader.py`); its other fields (beams, assistants, caches) are not
used, nor is `do_sample`.

Does not know: requests, files.
"""

from collections.abc import Mapping

from transformers import PreTrainedModel

from model.control.params import SamplingParams
from model.errors import InvalidArgumentError, ModelNotFoundError

_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json, and the sampling parameters that they are the defaults of."""


def sampling_defaults(network: PreTrainedModel) -> dict[str, object]:
    """Return the sampling parameters that a model recommends, by name. O(1).

    Args:
        network: as loaded, with its generation_config.json if it has one.

    Raises:
        ModelNotFoundError: a value is not allowed; the field is named.
    """
    config = network.generation_config
    found = {
        name: value
        for field, name in _NAMES.items()
        if (value := getattr(config, field, None)) is not None
    }
    try:
        SamplingParams(**found)  # its own check says what is wrong
    except InvalidArgumentError as error:
        raise ModelNotFoundError(
            f"model: generation_config.json: {error}; --generation-config vllm ignores its values"
        ) from error
    return found
