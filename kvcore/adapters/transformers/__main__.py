"""`transformers serve` over kvcore: `python -m kvcore.adapters.transformers serve ...`.

Decides: that every model which the server loads gets kvcore's cache before its first request; all
flags behind `serve` are Transformers' own.

Does not know: requests.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import main

from kvcore.adapters.transformers.batching import install


def served(backend: str | None) -> None:
    """Install kvcore in every model that `transformers serve` loads from now on in this process.

    Args:
        backend: as `install` takes it.
    """
    load: Callable[..., Any] = ModelManager._load_model  # noqa: SLF001  # there is no hook

    def loaded(*given: Any, **named: Any) -> Any:  # noqa: ANN401  # theirs
        model = load(*given, **named)
        install(model, backend=backend)
        return model

    setattr(ModelManager, "_load_model", loaded)  # noqa: B010  # a method, to the type checker


def _run(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m kvcore.adapters.transformers",
        "%(prog)s [--backend NAME] serve MODEL --continuous-batching [flags of transformers serve]",
        allow_abbrev=False,
    )
    parser.add_argument("--backend", help="attention kernels, as `install` takes them")
    parser.add_argument("command", choices=["serve"])
    options, rest = parser.parse_known_args(argv)
    if "--continuous-batching" not in rest:
        parser.error("--continuous-batching: wanted, plain generation has no cache to share")
    served(options.backend)
    sys.argv = ["transformers", "serve", *rest]
    main()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _run(sys.argv[1:])
