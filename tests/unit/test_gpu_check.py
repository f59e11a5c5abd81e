"""The first GPU hour, as far as a CPU goes: its steps measure, see what is wrong, and are not repeated once passed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composing import composed
from messages import holds, unpadded
from omegaconf import OmegaConf
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import engine, stack, steps
from benchmarks.pages import as_csv
from fspo.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[2]
SIZE = steps.SIZES["cpu"]
#: What the first two steps must not need; None makes its import fail.
NOT_NEEDED = ("verl", "ray", "vllm", "hydra", "omegaconf", "datasets", "pandas", "pyarrow", "matplotlib", "tensordict")


def check(numbers: dict[str, steps.Numbers]) -> None:
    assert {"torch", "without flash-attn"} <= numbers["versions"].keys()
    assert float(numbers["noise"]["bfloat16, two shapes: S / sqrt(L), rms"]) > 0
    assert numbers["noise"]["bfloat16, one shape: half-width of FSPO's band over it"] != 0


@pytest.fixture
def attention_of_transformers() -> Iterator[None]:
    """The steps have it. A test before this one may have imported that of runs on CPUs, whose packs leave no noise."""
    replaced = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa", sdpa_mask)
    yield
    AttentionInterface.register("sdpa", replaced[0])
    AttentionMaskInterface.register("sdpa", replaced[1])


@pytest.mark.usefixtures("attention_of_transformers")
def test_the_first_two_steps_measure_what_they_say() -> None:
    check({name: getattr(steps, name)(SIZE, "cpu") for name in ("versions", "noise")})


@pytest.mark.slow
def test_the_first_two_steps_need_torch_and_transformers_alone() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED}));"
        "import json, torch; torch.set_num_threads(1); from benchmarks.gpu_check import __main__, steps;"
        "print(json.dumps({n: getattr(steps, n)(steps.SIZES['cpu'], 'cpu') for n in ('versions', 'noise')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    check(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("driver", "says"), [("575.57.08", ("no device", "575.57.08", str(steps.DRIVER))), (None, ("no device", "none"))]
)
def test_an_old_driver_fails_only_where_no_kernel_runs(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, says: tuple[str, ...]
) -> None:
    monkeypatch.setattr(steps, "driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(steps, "kernel_error", lambda: "no device")
    with pytest.raises(steps.Failed, match=holds(*says)):
        steps.versions(SIZE, "cuda")
    monkeypatch.setattr(steps, "kernel_error", lambda: None)
    assert (str(steps.DRIVER) in steps.versions(SIZE, "cuda").get("note", "")) == (driver is not None)


FLOOR, METRICS = "fspo/noise_floor/", dict.fromkeys(
    ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "response_length/min", "response_length/max",
     "training/rollout_probs_diff_mean", "fspo/first_minibatch_z_rms", "actor/grad_norm"), 0.01,
)  # fmt: skip


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        ({f"{FLOOR}S_rms/bin_00": 0.1, f"{FLOOR}margin": 4.9}, {f"{FLOOR}margin": 80.0}, ("4.9", "fp16", "fp32")),
        ({f"{FLOOR}S_rms/bin_00": 0.1, f"{FLOOR}margin": 5.1}, {}, None),
        ({f"{FLOOR}S_rms/bin_00": 0.0}, {}, None),
        ({}, {}, (FLOOR,)),
        ({f"{FLOOR}S_rms/bin_00": 0.0}, {"training/rollout_probs_diff_mean": 0.1}, (" 0.1",)),
    ],
)
def test_a_run_fails_on_noise_near_the_band_and_on_two_policies(
    first: dict[str, float], last: dict[str, float], says: tuple[str, ...] | None
) -> None:
    run = [METRICS | first, METRICS | last]
    if says is None:
        margin = min(first.get(f"{FLOOR}margin", np.inf), last.get(f"{FLOOR}margin", np.inf))
        measured = stack.verdict(run)["half-width of the band over the noise"]
        assert measured == ("no noise" if margin == np.inf else margin)
    else:
        with pytest.raises(steps.Failed, match=holds(*says)) as failure:
            stack.verdict(run)
        assert failure.value.numbers["gradient norm"] == 0.01


def test_packs_keep_sequences_apart_and_may_have_one_shape() -> None:
    tokens = [torch.full((length,), length) for length in (3, 4, 5)]
    two, one = steps.packs(tokens, [2, 0, 1], 8, False), steps.packs(tokens, [2, 0, 1], 8, True)
    assert [pack[2] for pack in two] == [pack[2] for pack in one] == [[(2, 0, 5), (0, 5, 8)], [(1, 0, 4)]]
    assert [pack[0].shape[1] for pack in two] == [8, 4] and [pack[0].shape[1] for pack in one] == [8, 8]
    assert one[0][1].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


#: So wide that a direction fitted to the tokens of a few sequences would not fit others.
WIDE = replace(SIZE, shape=(4096, 1024, 512, 1, 8, 2, 128))


@pytest.mark.parametrize("size", [SIZE, WIDE], ids=["narrow", "wide"])
def test_the_random_models_responses_end_and_its_tokens_are_characters(tmp_path: Path, size: steps.Size) -> None:
    stack.write_model(tmp_path / "model", size, "cpu", mean_length=24)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == size.shape[0] and not model.config.tie_word_embeddings
    assert len({tokenizer.decode([index]) for index in range(3, len(tokenizer))}) == len(tokenizer) - 3
    generator = torch.Generator().manual_seed(5)  # other tokens than those it was made with
    with torch.no_grad():
        logits = model(torch.randint(3, size.shape[0], (64, 64), generator=generator)).logits
    ends = logits.softmax(-1)[..., tokenizer.eos_token_id].mean()
    assert 1 / 48 < ends < 1 / 10  # a share of 1 / 24 was asked for


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpu_smoke_has_what_the_8b_job_has(gpus: int) -> None:
    smoke, job = composed(*stack.smoke_on(gpus)), composed("experiment=qwen3_8b")
    for path in (
        "model.use_remove_padding",
        "model.enable_gradient_checkpointing",
        "model.override_config",
        "actor.use_dynamic_bsz",
        "actor.ppo_max_token_len_per_gpu",
        "actor.fsdp_config.param_offload",
        "actor.fsdp_config.optimizer_offload",
        "actor.entropy_from_logits_with_chunking",
        "ref.fsdp_config.param_offload",
        "ref.fsdp_config.model_dtype",
        "rollout.dtype",
    ):
        ours, its = (OmegaConf.select(config.actor_rollout_ref, path, throw_on_missing=True) for config in (smoke, job))
        assert ours == its is not None, path
    assert smoke.actor_rollout_ref.rollout.tensor_model_parallel_size == gpus
    assert smoke.actor_rollout_ref.actor.ulysses_sequence_parallel_size == gpus
    bucket = smoke.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    for vocabulary, width, *_ in (stack.WIDE, stack.NARROW):
        assert 4 * vocabulary * width > bucket, "the way of weights larger than a bucket is not taken"
    assert stack.WIDE[1] == json.loads((ROOT / "recipe/runner/plan/models/Qwen3-8B.json").read_text())["hidden_size"]


def test_each_peak_of_the_engine_has_a_plan_beside_it(tmp_path: Path) -> None:
    """Only a GPU has peaks; a phase that the planner does not know would count as nothing."""
    shutil.copy(ROOT / "recipe/runner/plan/models/Qwen3-8B.json", tmp_path / "config.json")
    peaks = {"log_probs": 1.0, "update": 1.0, "save": 1.0}
    numbers = engine.compared(composed(*stack.smoke_on(1, 8192)), tmp_path, peaks)
    planned = [value for name, value in numbers.items() if "planner" in name]
    assert len(planned) == len(peaks) and min(map(float, planned)) > 0


def test_what_a_cpu_starts_composes() -> None:
    assert composed(*stack.SHAPED_ON_A_CPU).actor_rollout_ref.actor.fsdp_config.param_offload


def test_a_passed_step_is_not_repeated_and_a_failed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = {"versions": "passed", "engine": "failed", "noise": "passed"}
    ran: list[str] = []

    def run(step: str, *_: Any) -> dict[str, Any]:
        ran.append(step)
        numbers = {"ms": 1234.5, "why | how": f"{step}, with | a bar"}
        return {"seconds": 1.0, "log": f"{step}.log", "verdict": verdicts[step], "numbers": numbers}

    monkeypatch.setattr(command, "run", run)
    arguments = ["--device", "cpu", "--out", str(tmp_path / "out"), "--steps", *verdicts]
    assert command.main(arguments) == 1
    assert ran == ["versions", "engine", "noise"]
    verdicts["engine"] = "passed"
    assert command.main([*arguments, "--again", "noise"]) == 0
    assert ran[3:] == ["engine", "noise"]
    printed = unpadded(capsys.readouterr().out)
    assert "versions: passed before" in printed
    assert "engine: passed (1 s): ms: 1,234; why | how: engine, with | a bar" in printed
    assert f"| {command.STEPS['engine']} | passed | 1 |" in printed
    assert f"| {command.STEPS['vllm']} | {command.NOT_RUN} |" in printed
    monkeypatch.setattr(command, "machine", lambda *_: "another machine")
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "another machine" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model").touch()
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--out", str(tmp_path / "mine")])


def test_results_of_a_machine_become_the_record_and_its_tables_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU's results are carried here, and replace what said that nothing was run; those of CPUs stay."""
    monkeypatch.setattr(command, "RECORD", ROOT / "no_such_folder")
    with pytest.raises(SystemExit):
        command.main(["--write", "--out", str(tmp_path)])
    assert f"{tmp_path}/results.json" in capsys.readouterr().err
    row = {"seconds": 61.0, "log": "vllm.log", "verdict": "passed", "commit": "abc"}
    on_cpus = {"device": "cpu", "machine": "cpu", "steps": {"vllm": {**row, "numbers": {"start, s": 20.0}}}}
    failed = {**row, "verdict": "failed", "reason": "no memory"}
    on_a_gpu = {"device": "cuda", "machine": "1 x H100", "steps": {"vllm": {**failed, "numbers": {"start, s": 95.25}}}}
    assert command.not_planned({"cpu": on_cpus})[2] == ["vLLM's start, s", "20", "not run"]
    record, tables = tmp_path / "record.json", {}
    record.write_text(json.dumps({"cpu": on_cpus}))
    (tmp_path / "results.json").write_text(json.dumps(on_a_gpu))
    monkeypatch.setattr(command, "RECORD", record)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "write_tables", tables.update)
    assert command.main(["--write", "--out", str(tmp_path)]) == 0
    assert json.loads(record.read_text()) == {"cpu": on_cpus, "cuda": on_a_gpu}
    assert tables["gpu-check"][0] == ["step", "number", "on CPUs", "on a GPU"]
    for cells in (["", "machine", "cpu", "1 x H100"], [command.STEPS["vllm"], "verdict", "passed", "failed"]):
        assert cells in tables["gpu-check"]
    assert [command.STEPS["vllm"], "reason", "", "no memory"] in tables["gpu-check"]
    assert ["real stack, demo model", "verdict", "not run", "not run"] in tables["gpu-check"]
    assert "| vLLM's start, s | 20 | 95.2 |" in unpadded(capsys.readouterr().out)
    later = on_a_gpu | {"steps": {"smoke": {**row, "numbers": {"step, s": 127.0}}}}
    for machine, steps_of_both in (("1 x H100", {"vllm", "smoke"}), ("1 x H200", {"smoke"})):
        (tmp_path / "results.json").write_text(json.dumps(later | {"machine": machine}))
        assert command.main(["--write", "--out", str(tmp_path)]) == 0
        assert json.loads(record.read_text())["cuda"]["steps"].keys() == steps_of_both


def test_the_tables_of_the_pages_are_those_of_the_record() -> None:
    record = json.loads(command.RECORD.read_text(encoding="utf-8"))
    tables = ROOT / "docs/tables"
    assert (tables / "gpu-check.csv").read_text(encoding="utf-8") == as_csv(command.table(record))
    heads, *cells = command.not_planned(record)
    assert markdown_table(heads, cells) in (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def test_the_page_plans_every_step_in_the_order_of_the_program() -> None:
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    table = page.split("| step | needs | minutes planned |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:4] for row in table.splitlines()[2:]]
    assert [step for steps, *_ in rows for step in steps.strip("` ").split()] == list(command.STEPS)
    assert all(int(minutes) > 0 for _, _, minutes in rows)


@pytest.mark.slow
def test_a_step_that_breaks_leaves_its_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--out", str(tmp_path), "--steps", "versions", "noise"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    rows = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert {step: row["verdict"] for step, row in rows.items()} == {"versions": "failed", "noise": "skipped"}
    assert "runs no kernel" in rows["versions"]["reason"] and "torch sees no GPU" in rows["noise"]["reason"]
    assert "torch" in rows["versions"]["numbers"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["engine", "vllm"])
def test_each_engine_alone_on_a_cpu(step: str, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--steps", step]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, check=True, timeout=600)
    row = json.loads((tmp_path / "results.json").read_text())["steps"][step]
    assert row["verdict"] == "passed"
    if step == "engine":
        assert row["numbers"]["largest |S| of the first mini-batch"] == 0 and row["numbers"]["save, GB/s"] > 0
    else:
        assert row["numbers"]["model runner"].startswith("vllm.v1.worker.cpu_model_runner")
        assert row["numbers"]["front end alone, tokens/s"] > row["numbers"]["tokens/s"] > 0
        assert 0 < row["numbers"][engine.APART] < 0.05
        assert 0 < row["numbers"]["S between them / sqrt(L), rms"] < 0.1


def test_a_run_that_ends_by_itself_is_not_taken_for_a_preempted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(stack, "SHAPED_ON_A_CPU", ("hydra.searchpath=[nowhere]",))  # refused at once
    with pytest.raises(steps.Failed, match=holds("before its first step", "status 2", "preemption-run.log")):
        stack.preemption(tmp_path, SIZE, "cpu", 1)


def test_without_flash_attn_the_stack_gets_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of its Triton cross-entropy alone has no attention."""
    assert composed(*stack.smoke_on(1), *stack.attention()).actor_rollout_ref.model.override_config == {
        "attn_implementation": "sdpa"
    }
    monkeypatch.setattr(stack.importlib.util, "find_spec", lambda name: object())
    assert stack.attention() == ()


@pytest.mark.slow
def test_a_call_of_a_loan_keeps_its_parts_and_the_last_one_runs_the_steps(tmp_path: Path) -> None:
    """The same words in every call; packages that only the parts bring are imported, from bytecode compiled once."""
    site, copy, keep, out = (tmp_path / name for name in ("site", "copy", "keep", "out"))
    (site / "only_in_the_parts").mkdir(parents=True)
    (site / "only_in_the_parts/__init__.py").write_text("here = 1\n")
    (site / "random.bin").write_bytes(np.random.default_rng(0).bytes(20_000))
    out.mkdir()
    for folder in ("benchmarks", "fspo", "recipe", "requirements"):
        copy.mkdir(exist_ok=True)
        (copy / folder).symlink_to(ROOT / folder)
    scripts = {"LOAN": ROOT / "benchmarks/gpu_check/loan.sh", "BUNDLE": ROOT / "requirements/bundle.sh"}
    pack = ["bash", str(scripts["BUNDLE"]), "pack", str(site), str(tmp_path / "parts")]
    subprocess.run(pack, check=True, env=os.environ | {"PART_BYTES": "12000"}, capture_output=True)
    parts = sorted((tmp_path / "parts").glob("part-*"))
    assert len(parts) > 1

    def call(*words: str, **variables: str) -> str:
        words = ("bash", str(copy / "benchmarks/gpu_check/loan.sh"), "abc", str(keep), *words)
        variables = os.environ | {"PYTHON": sys.executable, "OUT": str(out), "PYTHONDONTWRITEBYTECODE": "1"} | variables
        done = subprocess.run(words, cwd=copy, env=variables, capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr

    def carried(*paths: Path) -> None:
        shutil.rmtree(copy / "runs/gpu_slim", ignore_errors=True)
        (copy / "runs/gpu_slim").mkdir(parents=True)
        for path in paths:
            shutil.copy(path, copy / "runs/gpu_slim")

    carried(parts[0], tmp_path / "parts/parts.sha256", tmp_path / "parts/files.sha256")
    assert "not here yet: part-0001" in call()
    assert json.loads((keep / "check/results.json").read_text())["steps"]["noise"]["verdict"] == "skipped"
    shutil.rmtree(keep / "check")
    carried(*parts[1:])
    assert "unpacked" in call("versions", DEVICE="cpu")
    assert (keep / "site/random.bin").read_bytes() == (site / "random.bin").read_bytes()
    assert list((keep / "site/only_in_the_parts/__pycache__").iterdir())
    results = json.loads((keep / "check/results.json").read_text())["steps"]["versions"]
    assert results["verdict"] == "passed" and results["commit"] == "abc"
    with tarfile.open(out / "gpu_check.tgz") as archive:
        assert "check/results.json" in archive.getnames()
