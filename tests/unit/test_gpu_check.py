"""The first GPU hour, as far as a CPU goes: its steps measure, see what is wrong, and are not repeated once passed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composing import composed
from messages import holds, unpadded
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import stack, steps
from benchmarks.pages import as_csv
from fspo.table import TableWriter

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
def test_what_the_steps_start_composes(gpus: int) -> None:
    assert composed(*stack.SHAPED_ON_A_CPU).actor_rollout_ref.actor.fsdp_config.param_offload
    smoke = composed(*stack.smoke_on(gpus)).actor_rollout_ref
    assert smoke.rollout.tensor_model_parallel_size == smoke.actor.ulysses_sequence_parallel_size == gpus
    bucket = smoke.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    for vocabulary, width, *_ in (stack.WIDE, stack.NARROW):
        assert 4 * vocabulary * width > bucket, "the way of weights larger than a bucket is not taken"
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        for job, precision in ((stack.LEARN, stack.PRECISIONS), (stack.ON_A_CPU, stack.PRECISIONS_ON_A_CPU)):
            assert composed(*job, *precision[name]).actor_rollout_ref.rollout.dtype == dtype


def test_learning_is_told_from_its_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the run's own files: rows whose S spreads like sqrt(L), and validations of 256 problems."""
    draw = np.random.default_rng(0)
    length = np.exp(draw.uniform(np.log(8), np.log(256), 4000)).astype(int)
    audit = TableWriter(tmp_path / "responses", {"loss": "fspo"}, run="run")
    for step in range(20):
        part = slice(200 * step, 200 * (step + 1))
        rows = {"S": 0.02 * np.sqrt(length[part]) * draw.normal(size=200), "L": length[part], "A": 1.0}
        audit.append(rows | {"step": step + 1, "update": step + 1, "minibatch": 1})
    of_step = METRICS | {"critic/rewards/mean": 0.5, "timing_s/step": 3.0}
    numbers = stack.learned(tmp_path, [{}, of_step, of_step])
    pairs = str(numbers["std of S, by mean length"]).split("; ")
    lengths, stds = np.array([pair.split(": ") for pair in pairs], float).T
    assert stds == pytest.approx(0.02 * np.sqrt(lengths), rel=0.2) and lengths[-1] > 8 * lengths[0]
    assert 0.4 < float(str(numbers["S spreads like L to the"]).split()[0]) < 0.6
    assert numbers["a step, s (median)"] == 3.0 and numbers["half-width of the band over the noise"] == "no noise"

    def run_of(after: float) -> None:
        ends = [{"val-core/fspo/remainder/acc/mean@1": value} for value in (0.4, after)]
        monkeypatch.setattr(stack, "train", lambda *_: [ends[0], of_step, of_step | ends[1]])

    monkeypatch.setattr(stack, "learned", lambda *_: {})
    run_of(0.6)
    assert stack.learn(tmp_path, "cuda")["bf16: held-out accuracy after"] == "0.600 [0.539, 0.658]"
    run_of(0.5)
    with pytest.raises(steps.Failed, match="fp32 and bf16") as failure:
        stack.learn(tmp_path, "cuda")
    assert failure.value.numbers["fp32: held-out accuracy before"] == "0.400 [0.342, 0.461]"


def test_a_passed_step_is_not_repeated_and_a_failed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = {"versions": "passed", "smoke": "failed", "noise": "passed"}
    ran: list[str] = []

    def run(step: str, *_: Any) -> dict[str, Any]:
        ran.append(step)
        numbers = {"ms": 1234.5, "why | how": f"{step}, with | a bar"}
        return {"seconds": 1.0, "log": f"{step}.log", "verdict": verdicts[step], "numbers": numbers}

    monkeypatch.setattr(command, "run", run)
    arguments = ["--device", "cpu", "--out", str(tmp_path / "out"), "--steps", *verdicts]
    assert command.main(arguments) == 1
    assert ran == ["versions", "smoke", "noise"]
    verdicts["smoke"] = "passed"
    assert command.main([*arguments, "--again", "noise"]) == 0
    assert ran[3:] == ["smoke", "noise"]
    printed = unpadded(capsys.readouterr().out)
    assert "versions: passed before" in printed
    assert "smoke: passed (1 s): ms: 1,234; why | how: smoke, with | a bar" in printed
    assert f"| {command.STEPS['smoke']} | passed | 1 |" in printed
    assert f"| {command.STEPS['learn']} | {command.NOT_RUN} |" in printed
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
    row = {"seconds": 61.0, "log": "noise.log", "verdict": "passed", "commit": "abc"}
    on_cpus = {"device": "cpu", "machine": "cpu", "steps": {"noise": {**row, "numbers": {"layers": 20.0}}}}
    failed = {**row, "verdict": "failed", "reason": "no memory"}
    on_a_gpu = {"device": "cuda", "machine": "1 x H100", "steps": {"noise": {**failed, "numbers": {"layers": 95.25}}}}
    record, tables = tmp_path / "record.json", {}
    record.write_text(json.dumps({"cpu": on_cpus}))
    (tmp_path / "results.json").write_text(json.dumps(on_a_gpu))
    monkeypatch.setattr(command, "RECORD", record)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "write_tables", tables.update)
    assert command.main(["--write", "--out", str(tmp_path)]) == 0
    assert json.loads(record.read_text()) == {"cpu": on_cpus, "cuda": on_a_gpu}
    assert tables["gpu-check"][0] == ["step", "number", "on CPUs", "on a GPU"]
    for cells in (["", "machine", "cpu", "1 x H100"], [command.STEPS["noise"], "verdict", "passed", "failed"]):
        assert cells in tables["gpu-check"]
    assert [command.STEPS["noise"], "reason", "", "no memory"] in tables["gpu-check"]
    assert [command.STEPS["learn"], "verdict", "not run", "not run"] in tables["gpu-check"]
    later = on_a_gpu | {"steps": {"smoke": {**row, "numbers": {"step, s": 127.0}}}}
    for machine, steps_of_both in (("1 x H100", {"noise", "smoke"}), ("1 x H200", {"smoke"})):
        (tmp_path / "results.json").write_text(json.dumps(later | {"machine": machine}))
        assert command.main(["--write", "--out", str(tmp_path)]) == 0
        assert json.loads(record.read_text())["cuda"]["steps"].keys() == steps_of_both


def test_the_table_of_the_pages_is_that_of_the_record() -> None:
    record = json.loads(command.RECORD.read_text(encoding="utf-8"))
    assert (ROOT / "docs/tables/gpu-check.csv").read_text(encoding="utf-8") == as_csv(command.table(record))


@pytest.mark.slow
def test_a_step_that_breaks_leaves_its_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--out", str(tmp_path), "--steps", "versions", "noise"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    rows = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert {step: row["verdict"] for step, row in rows.items()} == {"versions": "failed", "noise": "skipped"}
    assert "runs no kernel" in rows["versions"]["reason"] and "torch sees no GPU" in rows["noise"]["reason"]
    assert "torch" in rows["versions"]["numbers"]


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
