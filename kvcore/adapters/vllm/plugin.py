"""The plugin that makes kvcore vLLM's KV cache manager: `VLLM_PLUGINS=kvcore vllm serve ...`.

Every vLLM that has kvcore beside it imports this module, of whatever version, so it imports nothing
of vLLM. `register` looks at `VLLM_PLUGINS` first, which must name kvcore, then at the version, and
only then imports `engine`. Whatever is not as expected there leaves vLLM as it is, with one line in
its log.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import Final

VERSIONS: Final = ("0.22", "0.32", "0.33")
"""The minor versions of vLLM that this adapter was tried with."""

LOGGER: Final = "vllm.plugins.kvcore"
"""The name of the logger, below that of vLLM."""


def version() -> str:
    """Return which vLLM this process has imported; "of an unknown version" if it does not say."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "of an unknown version"))


def minor_version() -> str:
    """Return the version as `VERSIONS` names it."""
    return ".".join(version().split(".")[:2])


def register() -> None:
    """Make kvcore the KV cache manager of the engines of this process; vLLM calls it."""
    if "kvcore" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    why = ""
    if minor_version() in VERSIONS:
        try:
            import_module("kvcore.adapters.vllm.engine").install()
        except (ImportError, AttributeError) as error:
            why = f", in which a name has moved ({error})"
        else:
            return
    logging.getLogger(LOGGER).warning(
        "kvcore leaves the KV cache to vLLM's own manager: vLLM %s%s; supported are %s",
        version(),
        why,
        ", ".join(VERSIONS),
    )
