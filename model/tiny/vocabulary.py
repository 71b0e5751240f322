"""Decides how text becomes tokens: a byte-level BPE vocabulary learned from the corpus.

Invariants: every text has an encoding and decodes to itself, because each of the 256 bytes is a
token; the end-of-text token has id 0 and is never made of other text's bytes; nothing is added
around an encoded text. It does not know about documents or models.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first
VOCAB_SIZE = 2048
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n\n{% endfor %}"
"""A paragraph for each message: the model has read documentation, and no conversation."""


def learn_vocabulary(
    texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE, model_max_length: int = 2048
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, the end-of-text token and 256 bytes included.

    About 2 seconds for 2.5 MB. The class is one that `AutoTokenizer` loads from a saved folder
    as it is, so that its splitting rules are read from the file and not guessed from the model's
    architecture.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # Transformers leaves it bare
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
