"""The prediction as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recipe.runner.plan.memory import GIB, PHASES

_TITLES = {
    "rollout": "rollout",
    "log_probs": "log-probs",
    "update": "update",
    "optimizer": "optimizer",
    "sync": "to vLLM",
}


def render(planned: dict[str, Any]) -> str:
    """All sections, as plain text."""
    return "\n".join([*_head(planned), "", *_memory(planned), "", *_rest(planned)])


def _head(planned: dict[str, Any]) -> Iterator[str]:
    model, setup = planned["model"], planned["setup"]
    yield (
        f"{model['name']}: {model['parameters'] / 1e9:.2f}e9 parameters, "
        f"{model['kv_bytes_per_token'] / 1024:.0f} KiB of keys and values per token"
    )
    yield (
        f"{setup['nodes']} x {setup['gpus']} GPUs of {planned['hardware']['gpu_gb']:g} GiB"
        f"{' to train, ' + str(setup['rollout_gpus']) + ' to generate' if setup['rollout_gpus'] else ''}; "
        f"{setup['prompts']} prompts x {setup['n']} responses a step, "
        f"{setup['prompts'] // max(1, setup['mini_prompts']) * setup['epochs']} updates, "
        f"at most {setup['max_prompt']} + {setup['max_response']} tokens, "
        f"{setup['tokens_per_gpu']} tokens a GPU and micro-batch"
    )


def _memory(planned: dict[str, Any]) -> Iterator[str]:
    limit = planned["hardware"]["gpu_gb"]
    yield f"{'GiB per GPU':28}" + "".join(f"{_TITLES[phase]:>11}" for phase in PHASES)
    memory = planned["memory"]
    for name in (*dict.fromkeys(item for phase in PHASES for item in memory[phase] if item != "total"), "total"):
        values = [memory[phase].get(name, 0.0) / GIB for phase in PHASES]
        if any(value >= 0.005 for value in values):
            yield f"{name:28}" + "".join(f"{value:11.2f}" if value >= 0.005 else f"{'':11}" for value in values)
    totals = [memory[phase]["total"] / GIB for phase in PHASES]
    yield f"{'fits':28}" + "".join(f"{'yes' if total <= limit else 'NO':>11}" for total in totals)
    yield f"host memory for offloaded states: {planned['host_bytes_per_node'] / GIB:.0f} GiB per node"
    yield (
        f"KV cache per replica of {planned['setup']['replica_gpus']} GPUs: {planned['kv_tokens_per_replica']} tokens, "
        f"{planned['full_sequences_per_replica']} sequences of full length"
    )
    requests = planned["requests"]
    yield f"requests at once: {requests['per_server']} to each of {requests['servers']} vLLM server(s)"


def _rest(planned: dict[str, Any]) -> Iterator[str]:
    band, time, hardware = planned["band"], planned["time_s"], planned["hardware"]
    peak, bandwidth = f"{hardware['gpu_tflops']:g} TFLOP/s", f"{hardware['gpu_tb_per_s']:g} TB/s"
    if "lower" in band:
        yield (
            f"band of {band['loss_mode']} ({band['band']}) at L = {band['length']}: S from {band['lower']:.3f} to "
            f"{band['upper']:+.3f} nats, ratio {band['ratio_low']:.3g} to {band['ratio_high']:.3g}; accepts "
            f"{100 * band['acceptance']:.0f}% if a token's log-ratio has a standard deviation of {hardware['sigma']:g}"
        )
    for note in band["notes"]:
        yield f"  {note}"
    tokens = planned["tokens_per_step"]
    yield f"tokens a step: {tokens['expected'] / 1e6:.1f}e6 expected, {tokens['at_most'] / 1e6:.1f}e6 at most"
    separate, asynchronous = planned["setup"]["rollout_gpus"] > 0, planned["setup"]["mode"] != "sync"
    yield (
        f"step time: {time['total']:.0f} s = {'the larger of ' if separate else ''}generation {time['generation']:.0f} "
        f"{'and' if separate else '+'} log-probs {time['log_probs']:.0f} + update {time['update']:.0f} + offloading "
        f"{time['offload']:.0f}; {planned['tokens_per_s']:.0f} tokens/s"
    )
    yield (
        f"  assuming mean lengths {planned['mean_prompt']:g} + {planned['mean_response']:g}, "
        f"{'no wait for the longest response' if asynchronous else 'one response at the maximum'}, "
        f"{planned['concurrent_sequences_per_replica']} sequences decoded together in a replica,"
    )
    yield (
        f"  mfu {hardware['mfu']:g} of {peak}, decoding at {hardware['decode_efficiency']:g} of {bandwidth}; "
        "rewards and validation not counted (--help)"
    )
    if (run := planned["run"]) is not None:
        yield (
            f"the run: {run['steps']} steps take {run['hours']:.0f} h, {run['jobs']} job(s) of "
            f"{hardware['job_hours']:g} h; with --requeue each continues from the last checkpoint"
        )
