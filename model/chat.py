"""A conversation in the terminal: `python -m model.chat`.

Decides: which flags there are, with the defaults that suit a conversation, and that they are read
before anything slow is loaded.

Does not know: how an answer comes about (`cli/conversation.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.cli.exits import leaves
from model.cli.options import ChatOptions, ModelOptions
from model.cli.settings import Flags
from model.control.config import EngineConfig
from model.control.params import SamplingParams

_EPILOG = """\
/clear forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops an answer. Lines are read
from stdin, answers are written to stdout. The exit codes are those of model.run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, parsed."""

    chat: ChatOptions
    model: ModelOptions
    params: SamplingParams
    engine: EngineConfig


def chat_flags() -> Flags:
    """Return the flags of `python -m model.chat`. O(flags)."""
    flags = Flags("python -m model.chat", "Talk to a model in the terminal.", _EPILOG)
    flags.add("model and hardware", ModelOptions)
    flags.add("conversation", ChatOptions)
    sampling = {"max_tokens": 512, "temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1}
    flags.add("sampling", SamplingParams, without=("n", "logprobs"), **sampling)
    flags.add("engine: KV cache, scheduling and execution", EngineConfig, max_num_seqs=1)
    return flags


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Parse a command line; None: the process's own. O(argv).

    Raises:
        UsageError: an unknown flag, or a value that is not allowed.
        InvalidArgumentError: settings that mean nothing together.
    """
    said = chat_flags().parse(argv)
    return Options(
        chat=said.of(ChatOptions),
        model=said.of(ModelOptions),
        params=said.of(SamplingParams),
        engine=said.of(EngineConfig),
    )


if __name__ == "__main__":
    with leaves():
        import sys

        from model.cli.imports import importing
        from model.cli.progress import say, telling

        options = parse_args()
        with importing(), telling("loading torch and Transformers"):
            from model.cli.conversation import Conversation, converse
            from model.cli.start import follow, make_engine

        if options.model.follows:
            sys.exit(follow(options.model, options.engine))
        engine = make_engine(options.model, options.engine, say)
        if options.model.model is None:
            say("the tiny model only continues texts about Python; --model names one that chats")
        talk = Conversation(
            engine, options.params, options.chat.system, lora_name=options.chat.lora_name
        )
        try:
            converse(talk, sys.stdin, sys.stdout, reports=options.chat.report)
        finally:  # by a signal too: tiers store the rest
            engine.end()
