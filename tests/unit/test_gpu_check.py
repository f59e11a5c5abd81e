"""The first GPU hour, as far as a CPU goes: its steps measure, see what is wrong, and are not repeated once passed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composing import composed
from messages import holds
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import stack, steps
from fspo.diagnostics import NoiseFloor

ROOT = Path(__file__).resolve().parents[2]
SIZE = steps.SIZES["cpu"]
#: What the first four steps must not need; None makes its import fail.
NOT_NEEDED = ("verl", "ray", "vllm", "hydra", "omegaconf", "datasets", "pandas", "pyarrow", "matplotlib", "tensordict")


def check(found: dict[str, str], agreement: str) -> None:
    assert "torch" in found["versions"] and "flash-attn" in found["versions"]
    assert f"as by {agreement}," in found["loss"] and "bfloat16: gradient" in found["loss"]
    assert "bfloat16, two shapes: " in found["noise"] and "bfloat16, one shape: " in found["noise"]
    assert "first mini-batch 0, of the last 0." in found["update"]


def test_the_first_four_steps_measure_what_they_say() -> None:
    found = {name: getattr(steps, name)(SIZE, "cpu") for name in ("versions", "loss", "noise", "update")}
    check(found, "its formula and verl")


@pytest.mark.slow
def test_the_first_four_steps_need_torch_and_transformers_alone() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED}));"
        "import json, torch; torch.set_num_threads(1); from benchmarks.gpu_check import steps;"
        "names = ('versions', 'loss', 'noise', 'update');"
        "print(json.dumps({n: getattr(steps, n)(steps.SIZES['cpu'], 'cpu') for n in names}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    check(json.loads(done.stdout.splitlines()[-1]), "its formula")


def test_a_loss_that_is_not_gspos_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "gspo_by_hand", lambda batch: 1.01 * torch.rand_like(batch.log_prob_BT.double()))
    with pytest.raises(steps.Failed, match="gradient"):
        steps.loss(SIZE, "cpu")


def test_noise_beside_the_band_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = NoiseFloor(np.array([100.0]), np.array([0.1]), np.array([0.3]))
    monkeypatch.setattr(steps, "floors", lambda *_: dict.fromkeys(steps.BANDS, noisy))
    with pytest.raises(steps.Failed, match="shuffle=false"):
        steps.noise(SIZE, "cpu")


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
    assert (str(steps.DRIVER) in steps.versions(SIZE, "cuda")) == (driver is not None)


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
        assert "over the noise" in stack.verdict(run)
    else:
        with pytest.raises(steps.Failed, match=holds(*says)):
            stack.verdict(run)


def test_packs_keep_sequences_apart_and_may_have_one_shape() -> None:
    tokens = [torch.full((length,), length) for length in (3, 4, 5)]
    two, one = steps.packs(tokens, [2, 0, 1], 8, False), steps.packs(tokens, [2, 0, 1], 8, True)
    assert [pack[2] for pack in two] == [pack[2] for pack in one] == [[(2, 0, 5), (0, 5, 8)], [(1, 0, 4)]]
    assert [pack[0].shape[1] for pack in two] == [8, 4] and [pack[0].shape[1] for pack in one] == [8, 8]
    assert one[0][1].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


def test_the_random_models_responses_end_and_its_tokens_are_characters(tmp_path: Path) -> None:
    stack.write_model(tmp_path / "model", SIZE, "cpu", mean_length=24)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == SIZE.shape[0] and not model.config.tie_word_embeddings
    assert len({tokenizer.decode([index]) for index in range(3, len(tokenizer))}) == len(tokenizer) - 3
    generator = torch.Generator().manual_seed(5)  # other tokens than those it was made with
    with torch.no_grad():
        logits = model(torch.randint(3, SIZE.shape[0], (8, 64), generator=generator)).logits
    ends = logits.softmax(-1)[..., tokenizer.eos_token_id].mean()
    assert 1 / 60 < ends < 1 / 10  # a share of 1 / 24 was asked for


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
    for vocabulary, width, *_ in (stack.WIDE, steps.SIZES["cuda"].shape):
        assert 4 * vocabulary * width > bucket, "the way of weights larger than a bucket is not taken"
    assert stack.WIDE[1] == json.loads((ROOT / "recipe/runner/plan/models/Qwen3-8B.json").read_text())["hidden_size"]


def test_what_a_cpu_starts_composes() -> None:
    assert composed(*stack.SHAPED_ON_A_CPU).actor_rollout_ref.actor.fsdp_config.param_offload


def test_a_passed_step_is_not_repeated_and_a_failed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = {"versions": "passed", "loss": "failed", "noise": "passed"}
    ran: list[str] = []

    def run(step: str, *_: Any) -> dict[str, Any]:
        ran.append(step)
        return {"step": step, "seconds": 1.0, "verdict": verdicts[step], "found": f"{step}, with | a bar"}

    monkeypatch.setattr(command, "run", run)
    arguments = ["--device", "cpu", "--out", str(tmp_path / "out"), "--steps", *verdicts]
    assert command.main(arguments) == 1
    assert ran == ["versions", "loss", "noise"]
    verdicts["loss"] = "passed"
    assert command.main([*arguments, "--again", "noise"]) == 0
    assert ran[3:] == ["loss", "noise"]
    printed = capsys.readouterr().out
    assert "versions: passed before" in printed
    assert "| loss: agreement, time | passed | 1 | loss, with \\| a bar |" in printed
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model").touch()
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--out", str(tmp_path / "mine")])


@pytest.mark.slow
def test_a_step_that_breaks_leaves_its_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--out", str(tmp_path), "--steps", "versions", "update"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["failed", "skipped"]
    assert "runs no kernel" in rows[0]["found"] and "torch sees no GPU" in rows[1]["found"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["engine", "vllm"])
def test_each_engine_alone_on_a_cpu(step: str, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--steps", step]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, check=True, timeout=600)
    (row,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["verdict"] == "passed"
    says = "largest |S| of the first mini-batch 0," if step == "engine" else "runner vllm.v1.worker.cpu_model_runner"
    assert says in row["found"]


def test_without_flash_attn_the_stack_gets_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of its Triton cross-entropy alone has no attention."""
    assert composed(*stack.smoke_on(1), *stack.attention()).actor_rollout_ref.model.override_config == {
        "attn_implementation": "sdpa"
    }
    monkeypatch.setattr(stack.importlib.util, "find_spec", lambda name: object())
    assert stack.attention() == ()
