"""Where a chat template ends a turn: vLLM stops there, because it did already or because the run adds a stop token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composing import composed
from messages import holds
from omegaconf import OmegaConf
from test_run_folder import allowed_changes, given
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.vllm_rollout import vllm_async_server

from recipe.fspo.job import JOB
from recipe.runner.launch import run_folder
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.end_of_turn import STOPS, end_of_turn
from recipe.runner.launch.prepare import add_stop_tokens, on_this_machine
from recipe.runner.launch.run_folder import Start
from recipe.runner.launch.values import MachineProblem, PreflightError
from recipe.runner.verl_patches import front_end

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
    "a system's message is wanted": (
        f"{{% if messages[0].role != 'system' %}}{_NO}{{% endif %}}{_CHATML}",
        "<|im_end|>",
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
    "parts of content": (
        f"{_EACH}{{% for p in m.content if p.type == 'text' %}}{{{{ p.text }}}}{{% endfor %}}<|im_end|>{_END}",
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


def stops_and_line(model: Path, *overrides: str, **more: Any) -> tuple[list[int], str]:
    config = on_this_machine(composed("run.dir=/nowhere", f"actor_rollout_ref.model.path={model}", *overrides))
    line = add_stop_tokens(config, **({"before": None} | more))
    return list(OmegaConf.select(config, STOPS) or []), line


def test_a_token_at_which_vllm_would_not_stop_is_added_and_named(model: MakeModel) -> None:
    for generation in (None, EOS, [EOS, EOS + 1]):
        stops, line = stops_and_line(model(generation=generation))
        assert stops == [END]
        for part in ("'<|im_end|>'", f"({END})", "'<|endoftext|>'", f"({EOS})", STOPS, "training and validation"):
            assert part in line
    assert stops_and_line(model(), f"++{STOPS}=[7]", "actor_rollout_ref.model.lora_rank=8")[0] == [7, END]


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        ({"generation": [EOS, END]}, []),
        ({"generation": END}, []),
        ({"config": END}, []),  # without generation_config.json vLLM reads this one
        ({"generation": EOS, "config": END, "template": ENDED["Zephyr"][0]}, []),
        ({}, [f"++{STOPS}=[{END}]"]),
        ({}, ["actor_rollout_ref.rollout.ignore_eos=true"]),
    ],
)
def test_where_vllm_stops_anyway_nothing_is_added_or_said(
    model: MakeModel, files: dict[str, Any], overrides: list[str]
) -> None:
    own = [END] if any(STOPS in override for override in overrides) else []
    assert stops_and_line(model(**files), *overrides) == (own, "")
    assert stops_and_line(Path("pkg://recipe.math.data/assets/demo_model")) == ([], ""), (
        "the demo ends turns with its eos"
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_ordinary_text_is_named_and_adds_nothing(model: MakeModel, kind: str) -> None:
    template, says = OTHERS[kind]
    stops, line = stops_and_line(model(template))
    assert stops == [] and says in line and f"'<|endoftext|>' ({EOS})" in line and f"++{STOPS}=[ID]" in line


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
    assert stops_and_line(at_eos, f"++{of_model}.tokenizer_path={chat_ml}")[0] == [END]
    assert stops_and_line(chat_ml, f"++{of_model}.tokenizer_path={at_eos}") == ([], "")
    custom = json.dumps("{{ messages[-1].content }}<|eot_id|>")
    assert stops_and_line(at_eos, f"{of_model}.custom_chat_template={custom}")[0] == [END + 1]
    switch = ENDED["an argument of the run's"][0]
    assert stops_and_line(model(switch, name="switch"))[0] == [END]
    thinking = "+data.apply_chat_template_kwargs.enable_thinking=false"
    assert stops_and_line(model(switch, name="switch"), thinking)[0] == [END + 1]
    # verl hands vLLM the model's folder: the eos of another tokenizer than that one's stops nothing.
    other = model(name="other")
    settings = json.loads((other / "tokenizer_config.json").read_text()) | {"eos_token": "<|im_end|>"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    assert stops_and_line(other) == ([], "")
    assert stops_and_line(chat_ml, f"++{of_model}.tokenizer_path={other}")[0] == [END]


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
    with pytest.raises(PreflightError, match=holds("model", str(broken), "download them again")):
        stops_and_line(broken)
    unknown = model(name="unknown")
    (unknown / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(PreflightError, match=holds("model", str(unknown), "unheard_of")):
        stops_and_line(unknown)
    with pytest.raises(PreflightError, match=holds(f"{STOPS}=['im_end']", "integer")):
        stops_and_line(broken, f"++{STOPS}=[im_end]")


def settled(folder: Path, *overrides: str) -> tuple[Any, str]:
    config, _, resume = given(f"run.dir={folder}", *overrides)
    config = on_this_machine(config)
    line = add_stop_tokens(config, resume.settings if resume else None)
    JOB.complete(config)
    return config, line


def test_a_run_keeps_its_stop_tokens(model: MakeModel, tmp_path: Path) -> None:
    overrides = ("data.offline_task.n_train=64", "data.offline_task.n_test=8", "actor_rollout_ref.model.path={}")
    new, earlier = tmp_path / "new", tmp_path / "earlier"
    path = model()
    own = [override.format(path) for override in overrides]
    for folder in (new, earlier):
        config, line = settled(folder, *own)
        assert OmegaConf.select(config, STOPS) == [END] and str(END) in line
        if folder == earlier:  # of a version that added none
            del config.actor_rollout_ref.rollout.custom
        run_folder.begin(Start(config, JOB, tuple(parsed(own))))
        (folder / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    config, line = settled(new)
    assert OmegaConf.select(config, STOPS) == [END] and line == "" and allowed_changes(config) == []
    config, line = settled(earlier)
    assert OmegaConf.select(config, STOPS) is None and allowed_changes(config) == []
    assert "'<|im_end|>'" in line and "run.dir" in line
    config, _ = settled(earlier, f"++{STOPS}=[{END}]")
    with pytest.raises(PreflightError, match=holds("rollout.custom", str(END), "run.allow_changed")):
        allowed_changes(config)
    # The model's files were mended since: the run goes on as it began, and its evaluation is of the same responses.
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END]}))
    config, line = settled(new)
    assert OmegaConf.select(config, STOPS) == [END] and line == ""


class _Asked(Exception):
    """Carries the sampling parameters that vLLM would have got."""


@pytest.mark.parametrize(
    ("custom", "asked", "stops"),
    [
        ("null", {}, []),
        ("{other: 1}", {"stop_token_ids": None}, []),
        ("{stop_token_ids: [5]}", {}, [5]),
        ("{stop_token_ids: [5, 6]}", {"stop_token_ids": [7, 6]}, [7, 6, 5]),  # of the tool agent's own
    ],
)
def test_every_request_gets_the_run_s_stop_tokens_beside_its_own(
    custom: str, asked: dict[str, Any], stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(**more: Any) -> None:
        raise _Asked(more["stop_token_ids"], more["detokenize"])

    monkeypatch.setattr(vllm_async_server, "SamplingParams", seen)
    rollout = composed(f"+actor_rollout_ref.rollout.custom={custom}")
    server = front_end.vLLMHttpServer.__new__(front_end.vLLMHttpServer)
    server.config = omega_conf_to_dataclass(rollout.actor_rollout_ref.rollout)
    server.config.max_model_len, server.replica_rank = 512, 0
    server._submission_paused, server._rejecting, server._disaggregation_role = False, False, "null"
    server.model_config = SimpleNamespace(lora_rank=0, lora={}, processor=None)
    before = dict(asked)
    with pytest.raises(_Asked) as caught:
        asyncio.run(server.generate([1, 2], asked, "request"))
    assert caught.value.args == (stops, False) and asked == before
