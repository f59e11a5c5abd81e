"""A character-level tokenizer in Hugging Face format, for the embedded offline task.

Every character of the alphabet is one token; anything else is ``<unk>``. Saved with ``save_pretrained`` it loads with
``AutoTokenizer`` and no remote code.
"""

from __future__ import annotations

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


def build_tokenizer(alphabet: str, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with ids ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2, then the alphabet in its order; no bos token.

    Args:
        alphabet: distinct characters, one token each.
        max_length: the model's context in tokens (``model_max_length``).

    Raises:
        ValueError: an empty alphabet or one with a character twice.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet must hold distinct characters, at least one, got {alphabet!r}")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNK))
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
