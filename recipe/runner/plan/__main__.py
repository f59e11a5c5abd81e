"""Predicts memory, batch arithmetic and time of a run on GPUs before it starts, and refuses what cannot fit.

usage: python -m recipe.runner.plan experiment=qwen3_8b nodes=2 gpus=8 [any Hydra override] [setting=value ...]

Everything that `python -m recipe.fspo.main` takes, it takes, too. Besides:
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipe.runner.launch import server_slots
from recipe.runner.launch.checks import batch_problems, head_problems, length_problems
from recipe.runner.launch.commands import BAD_INPUT, BadInput
from recipe.runner.plan import band, fit, step_time, table
from recipe.runner.plan.memory import PHASES, predict
from recipe.runner.plan.model import find_model
from recipe.runner.plan.setup import ALIASES, Hardware, compose_job, read_setup

_HARDWARE = {field.name: field for field in dataclasses.fields(Hardware)}
_OTHERS = {
    "model_config": "a config.json to read instead of the one of actor_rollout_ref.model.path",
    "json": "true: print one JSON object (bytes, seconds) instead of tables",
}


def help_text() -> str:
    """What ``--help`` prints."""
    lines = [__doc__.rstrip(), ""]
    meanings = {name: f"the same as {key}" for name, key in ALIASES.items()} | _OTHERS
    lines += [f"  {name:20}{meaning}" for name, meaning in meanings.items()]
    lines += [
        f"  {name:20}{Hardware.MEANING[name]}" + (f" [{field.default:g}]" if field.default else "")
        for name, field in _HARDWARE.items()
    ]
    lines += [
        "",
        "Exit status: 0 if the run fits, 2 if it does not or the input is wrong; each reason is a line on stderr that",
        "names the setting to change. The memory formulas are checked on CPUs (docs/performance.md);",
        "times follow from the guesses above and are for planning, not for comparing algorithms. Formulas and their",
        "sources: recipe/runner/plan/.",
    ]
    return "\n".join(lines)


def _hardware(own: Mapping[str, Any]) -> Hardware:
    values = {}
    for name in [name for name in _HARDWARE if name in own]:
        try:
            values[name] = float(own[name])
        except (TypeError, ValueError):
            raise BadInput(f"{name}={own[name]!r} is not a number ({Hardware.MEANING[name]})") from None
    return Hardware(**values)


def plan(config: DictConfig, hardware: Hardware, model_config: str | None = None) -> dict[str, Any]:
    """The whole prediction for a composed configuration, with the list of problems under ``problems``.

    Raises:
        NotPlannableError, UnknownModelError: If a prediction cannot be made at all.
    """
    setup = read_setup(config)
    model = find_model(config.actor_rollout_ref.model.path, model_config)
    memory = predict(model, setup, hardware)
    problems = [
        *batch_problems(config),
        *server_slots.problems(config),
        *length_problems(config, model.max_positions),
        *head_problems(config, model.heads),
        *fit.memory_problems(model, setup, hardware),
    ]
    time = step_time.estimate(model, setup, hardware, memory)
    return {
        "model": dataclasses.asdict(model)
        | {
            "parameters": model.parameters,
            "kv_bytes_per_token": model.kv_bytes_per_token(setup.vllm_bytes),
        },
        "setup": dataclasses.asdict(setup) | {"ranks": setup.ranks, "tokens_per_gpu": setup.tokens_per_gpu},
        "hardware": dataclasses.asdict(hardware),
        "memory": {phase: memory.items[phase] | {"total": memory.total(phase)} for phase in PHASES},
        "host_bytes_per_node": memory.host_bytes,
        "kv_tokens_per_replica": memory.kv_tokens,
        "full_sequences_per_replica": memory.kv_tokens // setup.longest,
        "requests": {
            "servers": server_slots.servers(config),
            "per_server": server_slots.requests_per_server(config),
        },
        "band": band.describe(config, hardware.sigma),
        "tokens_per_step": {"expected": time.tokens, "at_most": setup.sequences * setup.longest},
        "time_s": {
            "generation": time.generation_s,
            "log_probs": time.log_probs_s,
            "update": time.update_s,
            "offload": time.offload_s,
            "total": time.total_s,
        },
        "tokens_per_s": time.tokens_per_s,
        "concurrent_sequences_per_replica": time.concurrent,
        "mean_prompt": time.mean_prompt,
        "mean_response": time.mean_response,
        "run": _run_length(config.trainer.total_training_steps, time.total_s, hardware.job_hours),
        "problems": problems,
    }


def _run_length(steps: int | None, step_s: float, job_hours: float) -> dict[str, float] | None:
    """Hours of the whole run, and how many jobs of ``job_hours`` it takes; None where the steps are not given."""
    if not steps:
        return None
    hours = steps * step_s / 3600
    return {"steps": steps, "hours": hours, "jobs": math.ceil(hours / job_hours)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m recipe.runner.plan``; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    try:
        own, config = compose_job(arguments, [*_OTHERS, *_HARDWARE])
        if type(own.get("json", False)) is not bool:
            raise BadInput(f"json={own['json']!r}: give true or false")
        planned = plan(config, _hardware(own), own.get("model_config"))
    except (BadInput, HydraException, OmegaConfBaseException, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(planned, indent=1) if own.get("json") else table.render(planned))
    for problem in planned["problems"]:
        print(f"error: {problem}", file=sys.stderr)
    return BAD_INPUT if planned["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
