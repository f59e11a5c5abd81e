"""Where a chat template ends a turn: vLLM stops there, because it did already or because the run adds a stop token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composing import composed, here
from messages import holds
from omegaconf import OmegaConf
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from recipe.runner.launch import run_folder
from recipe.runner.launch.end_of_turn import FILE, SETTING, add_stop_token, end_of_turn, keep_stop_tokens
from recipe.runner.launch.problems import MachineProblem, Refused

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


#: Template and the token that ends a turn.
ENDED = {
    "ChatML": (_CHATML, "<|im_end|>"),
    "Llama 3, which strips": (
        f"{_EACH}{{{{ '<|h|>' + m.role + '\n\n' + m.content | trim + '<|eot_id|>' }}}}{_END}",
        "<|eot_id|>",
    ),
    "Llama 2, a blank before eos": (
        f"{_EACH}{{% if m.role == 'user' %}}[INST] {{{{ m.content }}}} [/INST]{{% elif m.role == 'system' %}}{_NO}"
        f"{{% else %}} {{{{ m.content }}}} {{{{ eos_token }}}}{{% endif %}}{_END}",
        "<|endoftext|>",
    ),
    "Zephyr": (f"{_EACH}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}{{{{ eos_token }}}}\n{_END}", "<|endoftext|>"),
    "a line break before it": (f"{_EACH}{{{{ m.content }}}}\n<|im_end|>{_END}", "<|im_end|>"),
    "Gemma, no system, a token that is special but of no role": (
        f"{_EACH}{{% if m.role == 'system' %}}{_NO}{{% endif %}}<|h|>{{{{ m.content | trim }}}}<end_of_turn>\n{_END}",
        "<end_of_turn>",
    ),
    "marks for training": (
        f"{_EACH}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}<|im_end|>{{% endgeneration %}}"
        f"{{% else %}}{{{{ m.content }}}}{{% endif %}}{_END}",
        "<|im_end|>",
    ),
    "thoughts before the last content": (
        f"{_EACH}{{% if loop.last %}}<think>\n\n</think>\n\n{{% endif %}}{{{{ m.content }}}}<|im_end|>\n{_END}",
        "<|im_end|>",
    ),
    "two special tokens": (f"{_EACH}{{{{ m.content }}}}<|eot_id|><|im_end|>{_END}", "<|eot_id|>"),
    "an argument of the run's": (
        f"{_EACH}{{{{ m.content }}}}{{{{ '<|eot_id|>' if enable_thinking is false else '<|im_end|>' }}}}{_END}",
        "<|eot_id|>",
    ),
}
#: Template and what is said of it.
OTHERS = {
    "Alpaca": (f"{_EACH}### {{{{ m.role }}}}:\n{{{{ m.content }}}}\n\n### {_END}", "ordinary text, '###'"),
    "another model's tokens": (f"{_EACH}{{{{ m.content }}}}<|end|>\n{_END}", "ordinary text, '<|end|>'"),
    "an added token that is text": (f"{_EACH}{{{{ m.content }}}}</answer>{_END}", "ordinary text, '</answer>'"),
    "text before the token": (f"{_EACH}{{{{ m.content }}}} (done)<|im_end|>{_END}", "ordinary text, '(done)"),
    "nothing": (f"{_EACH}<|{{{{ m.role }}}}|>\n{{{{ m.content }}}}{_END}", "nothing after"),
    "no assistant": (f"{_EACH}{{% if m.role == 'assistant' %}}{_NO}{{% endif %}}{_END}", "not that"),
    "a system's message is wanted": (
        f"{{% if messages[0].role != 'system' %}}{_NO}{{% endif %}}{_CHATML}",
        "not that",
    ),
    "content left out": (f"{_EACH}{{{{ m.role }}}}<|im_end|>{_END}", "does not render"),
}


@pytest.mark.parametrize("kind", ENDED)
def test_the_token_that_ends_a_turn(kind: str) -> None:
    template, token = ENDED[kind]
    made = tokenizer(template)
    arguments = {"enable_thinking": False, "add_generation_prompt": True}
    assert end_of_turn(made, arguments) == (token, made.convert_tokens_to_ids(token))


@pytest.mark.parametrize("kind", OTHERS)
def test_a_turn_that_does_not_end_with_a_token_is_described(kind: str) -> None:
    template, says = OTHERS[kind]
    text, token = end_of_turn(tokenizer(template), {})
    assert token is None and says in text


# ---------------------------------------------------------------- in a run

MakeModel = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> MakeModel:
    """Writes a model's folder: the tokenizer, the eos of its generation_config.json and that of its config.json."""

    def write(template: str | None = _CHATML, generation: Any = None, config: Any = None, name: str = "model") -> Path:
        folder = tmp_path / name
        tokenizer(template).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": config}))
        (folder / "model.safetensors").write_bytes(bytes(2048))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        return folder

    return write


END, EOS = (tokenizer().convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))


def stops_and_line(model: Path, *overrides: str, elsewhere: bool = False) -> tuple[list[int], str]:
    config = here(composed("trainer.default_local_dir=/nowhere", f"actor_rollout_ref.model.path={model}", *overrides))
    stops, line = add_stop_token(config, False, elsewhere)
    assert (OmegaConf.select(config, SETTING) == "/nowhere") == bool(stops)
    return stops, line


def folder_with(folder: Path, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(settings))
    return folder


def test_a_token_at_which_vllm_would_not_stop_is_added_and_named(model: MakeModel) -> None:
    for generation, own in ((None, [EOS]), (EOS, [EOS]), ([EOS, 7], [EOS, 7])):
        stops, line = stops_and_line(model(generation=generation), "actor_rollout_ref.model.lora_rank=8")
        assert stops == [*own, END]
        for part in ("'<|im_end|>'", f"({END})", "'<|endoftext|>'", f"({EOS})", f"/nowhere/{FILE}"):
            assert part in line


def test_a_folder_of_the_user_s_takes_the_place_of_the_model_s_file(
    model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_model = model(generation=[EOS, END])
    own = folder_with(tmp_path / "own", eos_token_id=[7])
    assert stops_and_line(of_model, f"++{SETTING}={own}")[0] == [EOS, 7, END]
    folder_with(own, eos_token_id=[7, END])
    assert stops_and_line(model(name="other"), f"++{SETTING}={own}") == ([], "")
    for named in ("auto", "vllm"):  # vLLM then reads the model's
        assert stops_and_line(of_model, f"++{SETTING}={named}") == ([], "")
    monkeypatch.chdir(tmp_path)  # vLLM's processes have another working folder
    config = here(
        composed("trainer.default_local_dir=/nowhere", f"actor_rollout_ref.model.path={of_model}", f"++{SETTING}=own")
    )
    assert OmegaConf.select(config, SETTING) == str(own)
    with pytest.raises(Refused, match=holds(f"{SETTING}={tmp_path / 'none'}", "another folder")):
        stops_and_line(of_model, f"++{SETTING}={tmp_path / 'none'}")


def test_vllm_takes_stop_tokens_and_nothing_else_of_the_run_s_file(tmp_path: Path) -> None:
    """Read by vLLM's own functions: requests keep their own stop tokens, and no setting of sampling changes."""
    from vllm import SamplingParams
    from vllm.transformers_utils.config import try_get_generation_config

    config = here(composed(f"trainer.default_local_dir={tmp_path / 'run'}"))
    (tmp_path / "run").mkdir()
    run_folder.begin(tmp_path / "run", OmegaConf.to_container(config), (), {}, stop_tokens=(EOS, END))
    settings = try_get_generation_config(str(tmp_path / "run"), trust_remote_code=False)
    assert settings is not None
    read = settings.to_diff_dict()
    assert read.keys() <= {"eos_token_id", "transformers_version"}
    before, asked = SamplingParams(stop_token_ids=[5], min_p=0.1), SamplingParams(stop_token_ids=[5], min_p=0.1)
    asked.update_from_generation_config(read, EOS)
    assert set(asked.stop_token_ids or ()) == {5, END} and asked._eos_token_id == EOS
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"):
        assert getattr(asked, name) == getattr(before, name)


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ({"generation": [EOS, END]}, []),
        ({"generation": END}, []),
        ({"config": END}, []),  # without generation_config.json vLLM reads this one
        ({"generation": EOS, "config": END, "template": ENDED["Zephyr"][0]}, []),
        ({}, ["actor_rollout_ref.rollout.ignore_eos=true"]),
    ],
)
def test_where_vllm_stops_anyway_nothing_is_added_or_said(
    model: MakeModel, files: dict[str, Any], overrides: list[str]
) -> None:
    assert stops_and_line(model(**files), *overrides) == ([], "")
    assert stops_and_line(Path("pkg://recipe.math.data/assets/demo_model")) == ([], ""), (
        "the demo ends turns with its eos"
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_ordinary_text_is_named_and_adds_nothing(model: MakeModel, kind: str) -> None:
    template, says = OTHERS[kind]
    stops, line = stops_and_line(model(template))
    assert stops == [] and says in line and f"'<|endoftext|>' ({EOS})" in line and f"++{SETTING}=" in line


def test_a_model_without_eos_stops_at_no_token_but_the_end_of_its_turn(model: MakeModel) -> None:
    for kind, stops in (("Alpaca", []), ("ChatML", [END])):
        folder = model({**OTHERS, **ENDED}[kind][0], name=kind)
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        of_run, line = stops_and_line(folder)
        assert of_run == stops and "vLLM stops at no token" in line


def test_the_template_and_the_eos_are_those_that_the_run_uses(model: MakeModel) -> None:
    at_eos, chat_ml = model(ENDED["Zephyr"][0], name="at_eos"), model(name="chat_ml")
    of_model = "actor_rollout_ref.model"
    assert stops_and_line(at_eos)[0] == []
    assert stops_and_line(at_eos, f"++{of_model}.tokenizer_path={chat_ml}")[0] == [EOS, END]
    assert stops_and_line(chat_ml, f"++{of_model}.tokenizer_path={at_eos}") == ([], "")
    custom = json.dumps("{{ messages[-1].content }}<|eot_id|>")
    assert stops_and_line(at_eos, f"{of_model}.custom_chat_template={custom}")[0] == [EOS, END + 1]
    switch = ENDED["an argument of the run's"][0]
    assert stops_and_line(model(switch, name="switch"))[0] == [EOS, END]
    thinking = "+data.apply_chat_template_kwargs.enable_thinking=false"
    assert stops_and_line(model(switch, name="switch"), thinking)[0] == [EOS, END + 1]
    # verl hands vLLM the model's folder: the eos of another tokenizer than that one's stops nothing.
    other = model(name="other")
    settings = json.loads((other / "tokenizer_config.json").read_text()) | {"eos_token": "<|im_end|>"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    assert stops_and_line(other) == ([], "")
    assert stops_and_line(chat_ml, f"++{of_model}.tokenizer_path={other}")[0] == [EOS, END]


def test_a_model_that_is_not_here_and_a_tokenizer_that_is_broken(
    model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    stops, line = stops_and_line(Path("some/model"), elsewhere=True)
    assert stops == [] and isinstance(line, MachineProblem) and "some/model" in line
    assert stops_and_line(model(None)) == ([], ""), "without a chat template the checks refuse the run"
    of_a_processor = model(None, name="of_a_processor")
    (of_a_processor / "chat_template.json").write_text(json.dumps({"chat_template": _CHATML}))
    assert stops_and_line(of_a_processor) == ([], "")
    broken = model()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(Refused, match=holds("model", str(broken), "download them again")):
        stops_and_line(broken)
    unknown = model(name="unknown")
    (unknown / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(Refused, match=holds("model", str(unknown), "unheard_of")):
        stops_and_line(unknown)


def test_a_run_keeps_its_stop_tokens(model: MakeModel, tmp_path: Path) -> None:
    """The model's file is another one later, and the run goes on as it began; its own file may not be missing."""
    path, run = model(generation=EOS), tmp_path / "run"
    words = (f"trainer.default_local_dir={run}", f"actor_rollout_ref.model.path={path}")
    config = here(composed(*words))
    assert add_stop_token(config, False)[0] == [EOS, END] and OmegaConf.select(config, SETTING) == str(run)
    again = here(composed(*words))
    keep_stop_tokens(again, OmegaConf.to_container(config))  # type: ignore[arg-type]
    assert OmegaConf.select(again, SETTING) == str(run)
    folder_with(path, eos_token_id=[EOS, END])
    earlier = here(composed(*words))
    assert add_stop_token(earlier, True) == ([], "") and OmegaConf.select(earlier, SETTING) is None
    folder_with(path, eos_token_id=EOS)
    stops, line = add_stop_token(here(composed(*words)), True)
    assert stops == [] and "'<|im_end|>'" in line, "it began without one"
    with pytest.raises(Refused, match=holds(f"{SETTING}={run}")):
        add_stop_token(here(composed(*words, f"++{SETTING}={run}")), True)
