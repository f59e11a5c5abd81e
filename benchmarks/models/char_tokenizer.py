"""A small tokenizer in Hugging Face format, for models made here.

Every character of the vocabulary is one token; anything else is ``<unk>``. Saved with ``save_pretrained`` it loads with
``AutoTokenizer`` and no remote code.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

# The generation prompt is "=": a chat with the single user message "3+14" is the text "3+14=".
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'user' %}{{ '=' if add_generation_prompt or not loop.last else '' }}"
    "{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def build_tokenizer(vocabulary: Sequence[str], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with ids ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2, then the vocabulary in its order; no bos token.

    Args:
        vocabulary: distinct characters.
        max_length: the model's context in tokens (``model_max_length``).
    """
    ids = {token: index for index, token in enumerate([PAD, EOS, UNK, *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
