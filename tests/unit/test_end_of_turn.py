"""Where a chat template ends a turn: vLLM stops there, because it did already or because the run adds a stop token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from composing import composed, here
from omegaconf import OmegaConf
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from recipe.runner.launch.end_of_turn import SETTING, add_stop_token, end_of_turn
from recipe.runner.launch.run_folder import GENERATION_FILE
from recipe.runner.launch.settings import Refused

_EACH, _END = "{% for m in messages %}", "{% endfor %}"
_CHATML = f"{_EACH}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{_END}"
_NO = "{{ raise_exception('not that') }}"


def tokenizer(template: str | None = _CHATML) -> Any:
    """A token a byte, an eos ``<|endoftext|>``, and the tokens of several families."""
    vocab = {symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    eos = dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>") | {"unk_token": None}
    made = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=512, **eos)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eot"]})
    made.add_tokens([AddedToken("<end_of_turn>", special=True), AddedToken("</answer>", special=False)])
    made.chat_template = template
    return made


#: Template and the token that ends a turn; None: there is none.
ENDS = {
    "ChatML": (_CHATML, "<|im_end|>"),
    "Zephyr": (f"{_EACH}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}{{{{ eos_token }}}}\n{_END}", "<|endoftext|>"),
    "Gemma, a token that is special but of no role": (
        f"{_EACH}<|h|>{{{{ m.content | trim }}}}<end_of_turn>\n{_END}",
        "<end_of_turn>",
    ),
    "an argument of the run's": (
        f"{_EACH}{{{{ m.content }}}}{{{{ '<|eot_id|>' if enable_thinking is false else '<|im_end|>' }}}}{_END}",
        "<|eot_id|>",
    ),
    "an added token that is text": (f"{_EACH}{{{{ m.content }}}}</answer>{_END}", None),
    "nothing": (f"{_EACH}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}{_END}", None),
    "no assistant": (f"{_EACH}{{% if m.role == 'assistant' %}}{_NO}{{% endif %}}{_END}", None),
}


@pytest.mark.parametrize("kind", ENDS)
def test_the_token_that_ends_a_turn(kind: str) -> None:
    template, token = ENDS[kind]
    made = tokenizer(template)
    found = end_of_turn(made, {"enable_thinking": False, "add_generation_prompt": True})
    assert found == (None if token is None else made.convert_tokens_to_ids(token))


def model(folder: Path, template: str | None = _CHATML, generation: Any = None, config: Any = None) -> Path:
    """A model's folder: the tokenizer, the eos of its generation_config.json and that of its config.json."""
    tokenizer(template).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": config}))
    (folder / "model.safetensors").write_bytes(bytes(2048))
    if generation is not None:
        (folder / GENERATION_FILE).write_text(json.dumps({"eos_token_id": generation}))
    return folder


END, EOS = (tokenizer().convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
OF_MODEL = "actor_rollout_ref.model"


def stops_and_line(model: Path | str, *overrides: str) -> tuple[list[int], str]:
    config = here(composed("trainer.default_local_dir=/nowhere", f"{OF_MODEL}.path={model}", *overrides))
    stops, line = add_stop_token(config, None, False)
    assert (OmegaConf.select(config, SETTING) == "/nowhere") == bool(stops)
    return stops, line


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, [EOS, END]),
        ({"generation": [EOS, 7]}, [EOS, 7, END]),
        # vLLM stops there anyway.
        ({"generation": END}, []),
        ({"config": END}, []),  # without generation_config.json vLLM reads this one
        ({"generation": EOS, "config": END, "template": ENDS["Zephyr"][0]}, []),
        ({"template": None}, []),  # without a chat template the checks refuse the run
    ],
)
def test_a_token_at_which_vllm_would_not_stop_is_added(tmp_path: Path, files: dict[str, Any], stops: list[int]) -> None:
    added, line = stops_and_line(model(tmp_path, **files))
    assert added == stops and bool(line) == bool(stops)


def test_ordinary_text_is_named_and_adds_nothing(tmp_path: Path) -> None:
    stops, line = stops_and_line(model(tmp_path, ENDS["nothing"][0]))
    assert stops == [] and f"'<|endoftext|>' ({EOS})" in line and f"++{SETTING}=" in line
    assert stops_and_line("pkg://recipe.math.data/assets/demo_model") == ([], ""), "the demo ends with its eos"


def test_a_folder_of_the_user_s_takes_the_place_of_the_model_s(tmp_path: Path) -> None:
    of_model, own = model(tmp_path / "model", generation=[EOS, END]), tmp_path / "own"
    own.mkdir()
    for given, stops in (([7], [EOS, 7, END]), ([7, END], [])):
        (own / GENERATION_FILE).write_text(json.dumps({"eos_token_id": given}))
        assert stops_and_line(of_model, f"++{SETTING}={own}")[0] == stops
    assert stops_and_line(of_model, f"++{SETTING}=auto") == ([], ""), "vLLM then reads the model's"


def test_template_and_eos_are_those_that_the_run_uses(tmp_path: Path) -> None:
    at_eos, chat_ml = model(tmp_path / "at_eos", ENDS["Zephyr"][0]), model(tmp_path / "chat_ml")
    assert stops_and_line(at_eos, f"++{OF_MODEL}.tokenizer_path={chat_ml}")[0] == [EOS, END]
    assert stops_and_line(chat_ml, f"++{OF_MODEL}.tokenizer_path={at_eos}") == ([], "")
    custom = json.dumps("{{ messages[-1].content }}<|eot_id|>")
    assert stops_and_line(at_eos, f"{OF_MODEL}.custom_chat_template={custom}")[0] == [EOS, END + 1]
    thinking = "+data.apply_chat_template_kwargs.enable_thinking=false"
    switch = model(tmp_path / "switch", ENDS["an argument of the run's"][0])
    assert stops_and_line(switch)[0] == [EOS, END] and stops_and_line(switch, thinking)[0] == [EOS, END + 1]
    # verl hands vLLM the model's folder: the eos of another tokenizer than that one's stops nothing.
    file = model(tmp_path / "other") / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|im_end|>"}))
    assert stops_and_line(file.parent) == ([], "")
    assert stops_and_line(chat_ml, f"++{OF_MODEL}.tokenizer_path={file.parent}")[0] == [EOS, END]


def test_what_cannot_be_loaded_is_refused_with_its_key(tmp_path: Path) -> None:
    """But for what may be on the machine of the run."""
    broken, absent = model(tmp_path / "broken"), f"++{OF_MODEL}.tokenizer_path=/nowhere/tokenizer"
    words = (f"{OF_MODEL}.path={model(tmp_path / 'model')}", absent)
    (broken / "tokenizer.json").write_text("{")
    for word in (f"++{OF_MODEL}.tokenizer_path={broken}", absent):
        with pytest.raises(Refused, match=word.strip("+")):
            stops_and_line(tmp_path / "model", word)
    for elsewhere in (words, (f"{OF_MODEL}.path={tmp_path}/mount",)):
        assert add_stop_token(here(composed(*elsewhere)), None, True) == ([], "")


def test_a_run_keeps_its_stop_tokens(tmp_path: Path) -> None:
    """Whatever the model's file is later; and where the model is not on this machine."""
    words = [f"trainer.default_local_dir={tmp_path}/run", f"{OF_MODEL}.path={model(tmp_path, generation=EOS)}"]
    config = here(composed(*words))
    assert add_stop_token(config, None, False)[0] == [EOS, END]
    elsewhere = here(composed(words[0], f"{OF_MODEL}.path=some/model"))
    add_stop_token(elsewhere, OmegaConf.to_container(config), True)  # type: ignore[arg-type]
    assert OmegaConf.select(elsewhere, SETTING) == f"{tmp_path}/run"
