"""What a run reads, model, data and reward: what is wrong with it is named with file or key, and a remedy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import answered_here
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composing import composed
from messages import holds
from omegaconf import OmegaConf
from refusals import FILES
from verl.trainer.ppo.reward import resolve_reward_manager_cls

from recipe.runner.launch import inputs, model_files, reward_trial, rewards
from recipe.runner.launch.prepare import on_this_machine

RULES = (*inputs.MODEL_AND_DATA, rewards.reward_problems)


def problems(*overrides: str) -> list[str]:
    config = on_this_machine(composed("run.dir=/nowhere", *overrides))
    return [problem for rule in RULES for problem in rule(config)]


def test_the_demo_has_what_it_needs() -> None:
    assert problems() == []


def test_an_incomplete_model_folder(tmp_path: Path) -> None:
    key = f"actor_rollout_ref.model.path={tmp_path}"

    def of_the_model(*parts: str) -> bool:
        return any(f"model.path='{tmp_path}'" in text and all(part in text for part in parts) for text in problems(key))

    assert of_the_model("config.json", "recipe.runner.export")
    (tmp_path / "config.json").write_text("{}")
    assert of_the_model("*.safetensors", "download") and of_the_model("has no tokenizer", "tokenizer.json")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert of_the_model("model-00001-of-00002.safetensors", "model.safetensors", "git-lfs", "download it again")
    assert of_the_model("chat_template.jinja") and not of_the_model("has no tokenizer")


def test_a_model_of_the_hub_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = problems("actor_rollout_ref.model.path=some/model")
    assert "model.path='some/model'" in problem and "HF_HUB_OFFLINE=1" in problem and "download" in problem
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert problems("actor_rollout_ref.model.path=some/model") == []


@pytest.mark.parametrize(
    ("files", "absent"),
    [
        (("config.json",), "weights"),
        (("config.json", "tokenizer.json", "tokenizer_config.json"), "weights"),
        (("config.json", "model.safetensors.index.json", "model-1.safetensors"), "model-2.safetensors"),
    ],
)
def test_a_model_of_which_the_hubs_cache_has_a_part_is_downloaded_or_refused_where_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], absent: str
) -> None:
    """The checks load the tokenizer, with which the model's config.json comes into the cache, and no weights do."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    contents = {
        "model.safetensors.index.json": json.dumps({"weight_map": shards}),
        "model-1.safetensors": " " * 10_000,
        "tokenizer_config.json": json.dumps({"chat_template": "..."}),
    }
    for file in files:
        (snapshot / file).write_text(contents.get(file, "{}"))
    setting = "actor_rollout_ref.model.path=some/model"
    assert problems(setting) == []
    note = model_files.download_note("some/model")
    assert all(part in note for part in ("model.path='some/model'", absent, "hf download some/model", "=FOLDER"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problem, *_ = problems(setting)
    assert all(part in problem for part in ("model.path='some/model'", absent, "HF_HUB_OFFLINE=1", "download"))


def test_a_model_in_a_folder_is_not_downloaded(tmp_path: Path) -> None:
    assert model_files.download_note(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("row", "truths"), [*((0, [truth]) for truth in (18, 0.5, ["18"], True, b"18", None)), (15, ["18"] * 15 + [None])]
)
def test_a_truth_that_is_not_text_is_named_if_the_recipes_reward_reads_it(
    tmp_path: Path, row: int, truths: list[object]
) -> None:
    prompt = [{"role": "user", "content": "1"}]
    rows = [{"data_source": "own", "prompt": prompt, "reward_model": {"ground_truth": truth}} for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    (problem,) = problems(f"data.val_files={tmp_path}/own.parquet")
    says = holds(f"{tmp_path}/own.parquet", f"row {row}", f"ground_truth={truths[row]!r}", "text")
    assert re.search(says, problem), problem


def own_file(tmp_path: Path, *truths: object, source: str = "own") -> str:
    prompt = [{"role": "user", "content": "1"}]
    rows = [{"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": truth}} for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    return f"data.val_files={tmp_path}/own.parquet"


TESTS = '{"inputs": ["1"], "outputs": ["2"]}'


def test_a_manager_of_the_users_judges_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_trial, "asked", answered_here.of_rewards)
    (tmp_path / "managers.py").write_text(FILES["managers.py"])
    own = f"{MANAGER}.source=importlib", f"{MANAGER}.module.path={tmp_path}/managers.py", f"{MANAGER}.name=Mine"
    (tmp_path / "reward.py").write_text("def other(a):\n    raise ValueError\n")
    unread, number = own_file(tmp_path, TESTS), [f"{FUNCTION}.path={tmp_path}/reward.py", f"{FUNCTION}.name=other"]
    for function in ([f"{FUNCTION}.path=null"], number):
        assert problems(unread, *own, *function) == []
        assert len(problems(unread, *function)) == 1
    assert problems(own_file(tmp_path, 18), *own) == []  # no text
    monkeypatch.undo()  # now in processes of their own
    (problem,) = problems(unread, *own, number[0])  # verl loads it all the same
    assert re.search(holds(f"{tmp_path}/reward.py", "compute_score", "other"), problem), problem


def test_a_reward_of_the_users_is_tried_on_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = f"{FUNCTION}.path={tmp_path}/reward.py"
    place = f"+{FUNCTION}.reward_kwargs.place=nowhere"
    for body, noted in (
        ("float(solution_str == ground_truth)", ()),
        ("print('noise') or float(solution_str == ground_truth)", ()),
        ("0.0", ("'18'", "own")),
        ("float('nan')", ("nan", "row 0", "failed")),
        ("open(place)", ("FileNotFoundError", "row 0", "failed")),
    ):
        (tmp_path / "reward.py").write_text(
            f"def compute_score(solution_str, ground_truth, place='', **_):\n    return {body}\n"
        )
        assert problems(own_file(tmp_path, "18", "19"), chosen, place) == []
        error = capsys.readouterr().err
        notes = [line for line in error.splitlines() if line.startswith("note: ")]
        assert len(notes) == bool(noted), error
        assert all(part in error for part in (*noted, *((f"{tmp_path}/reward.py",) if noted else ()))), error


def test_verls_own_reward_is_refused_for_a_data_source_that_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = f"{FUNCTION}.path=null"
    (problem,) = problems(own_file(tmp_path, "18"), chosen)  # by a process of its own
    monkeypatch.setattr(reward_trial, "asked", answered_here.of_rewards)
    assert re.search(holds(f"{FUNCTION}.path=null", "own", f"give {FUNCTION}.path"), problem), problem
    assert problems(own_file(tmp_path, "18", source="openai/gsm8k"), chosen) == []
    capsys.readouterr()
    assert problems(own_file(tmp_path, "18", source="searchR1_nq"), chosen) == []  # whose truths are records
    assert re.search(holds("note: ", f"{FUNCTION}.path=null", "row 0 of ", "failed"), capsys.readouterr().err)


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
@pytest.mark.parametrize(
    ("media", "has"),
    [
        ({"images": [[], [{"path": "/a.png"}]]}, "images"),
        ({"images": [None, ["/a.png"]]}, "images"),
        ({"audios": [["/a.wav"], []], "videos": [[], []]}, "audios"),
        ({"images": [[], []]}, None),
        ({"images": [None, []]}, None),
        ({"pictures": [["/a.png"], []]}, "pictures"),
        ({"other": [["/a.png"], []]}, None),
    ],
)
def test_images_need_a_model_with_a_processor(
    tmp_path: Path, suffix: str, media: dict[str, Any], has: str | None
) -> None:
    prompt = [{"role": "user", "content": "<image>1"}]
    row = {"data_source": "own", "prompt": prompt, "reward_model": {"ground_truth": "1"}}
    rows = [row | {column: values[number] for column, values in media.items()} for number in range(2)]
    file = tmp_path / f"own{suffix}"
    renamed = ["data.image_key=pictures"] if "pictures" in media else []
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows))
    refused = problems(f"data.val_files={file}", *renamed)
    assert len(refused) == (has is not None)
    assert all(re.search(holds(str(file), f"has {has} ", "model.path"), problem) for problem in refused), refused
    model = tmp_path / "model"
    shutil.copytree(model_files.model_folder("recipe/math/data/assets/demo_model") or "", model)
    (model / "preprocessor_config.json").write_text("{}")
    assert problems(f"data.val_files={file}", f"actor_rollout_ref.model.path={model}", *renamed) == []


FUNCTION, MANAGER = "reward.custom_reward_function", "reward.reward_manager"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("custom_reward_function.path=/x.py", f"{FUNCTION}.path", "/x.py"),
        ("custom_reward_function.path=/x.py", f"{FUNCTION}.name", "compute_score"),  # whose null verl would take
        ("custom_reward_function.name=mine", f"{FUNCTION}.path", "pkg://recipe.math.reward"),
        ("+custom_reward_function.reward_kwargs.a=1", f"{FUNCTION}.reward_kwargs.a", 1),
        ("reward_model.num_workers=8", "reward.num_workers", 8),  # verl's default, too
        ("reward_model.model.path=/rm", "reward.reward_model.model_path", "/rm"),
        ("reward_model.rollout.name=vllm", "reward.reward_model.rollout.name", "vllm"),
        ("sandbox_fusion.url=http://x", "reward.sandbox_fusion.url", "http://x"),
        ("sandbox_fusion.url=http://x", "reward.sandbox_fusion.memory_limit_mb", 1024),
    ],
)
def test_a_key_of_verls_earlier_reward_groups_is_moved_and_said(
    override: str, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on_this_machine(composed("run.dir=/nowhere", override))
    assert OmegaConf.select(config, key) == value
    assert not {"custom_reward_function", "reward_model", "sandbox_fusion"} & set(config)
    old = override.lstrip("+").partition("=")[0]
    assert re.search(holds("note: ", f"moved {old} to reward."), capsys.readouterr().err)


def test_values_of_the_rewards_settings_are_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "resolved-text")
    (tmp_path / "reward.py").write_text("def compute_score(solution_str):\n    return 0.0\n")
    settings = f"+{FUNCTION}.reward_kwargs={{place: '${{oc.env:PLACE}}', more: [resolved-text]}}"
    for path in ([], [f"{FUNCTION}.path={tmp_path}/reward.py"]):
        (problem,) = problems(settings, *path)
        assert "place" in problem and "resolved-text" not in problem


def test_a_file_is_imported_in_another_process_under_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(f"import sys\nprint('noise')\nassert 'verl' not in sys.modules\n{FILES['reward.py']}")
    assert problems(f"{FUNCTION}.path=reward.py") == []


def test_a_reward_manager_is_what_verl_would_load(tmp_path: Path) -> None:
    (tmp_path / "managers.py").write_text(FILES["managers.py"])
    chosen = (f"{MANAGER}.module.path={tmp_path}/managers.py", f"{MANAGER}.name=Mine")
    assert resolve_reward_manager_cls(on_this_machine(composed("run.dir=/nowhere", *chosen))).__name__ == "Mine"
