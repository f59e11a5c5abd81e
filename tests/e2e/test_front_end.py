"""Responses that vLLM hands over at their end, without text, are those that verl's own server would have got.

As a program: what both servers hand back of the same requests to one real engine on CPUs, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_stack import run_marked

from recipe.runner.launch.machine import platform_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS = [[5 + i, 6, 7, 8] for i in range(6)]
SEATS = 4  # of the engine: two requests wait in it


def test_the_same_responses_whole_stopped_and_aborted() -> None:
    done = run_marked(__file__, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("[{"))  # vLLM logs beside it
    verls, ours = json.loads(line)
    for name in ("whole", "stopped", "ended", "afterwards"):
        assert ours[name] == verls[name], name
    ids, _, reason = ours["stopped"]
    assert 0 < len(ids) < 64 and ids == ours["whole"][0][0][: len(ids)] and reason == "completed"
    # The token at which a response ends is a part of it.
    (ids, log_probs, reason), whole = ours["ended"], ours["whole"][0][0]
    assert ids == whole[: whole.index(whole[5]) + 1] and len(log_probs) == len(ids) and reason == "completed"
    for record in (verls, ours):
        for aborted, full in zip(record["aborted"], record["whole"], strict=True):
            (ids, log_probs, reason), (all_ids, all_log_probs, _) = aborted, full
            assert reason == "aborted" and ids == all_ids[: len(ids)]
            # A response is rounded differently beside others.
            assert log_probs == pytest.approx(all_log_probs[: len(ids)], abs=1e-4)
        assert [len(ids) >= 8 for ids, *_ in record["aborted"]] == [True] * 4 + [False] * 2
    # Handed over once for each response; text only for the stop string.
    assert (ours["handed over"], ours["with text"]) == (15, 1) and verls["handed over"] > 15 == verls["with text"]
    # An abort would wait for those that verl still counts: for all, if nothing comes before the end.
    assert (verls["admitting"], ours["admitting"]) == (2, 0)


def server(kind: type, engine: Any) -> Any:
    """One with an engine; verl's own start asks Ray for addresses and ports, and begins an HTTP server."""
    made = kind.__new__(kind)
    made.engine, made._admitting, made._submission_paused, made._rejecting = engine, 0, False, False
    made._resume_event = asyncio.Event()
    made.config = SimpleNamespace(
        max_model_len=512,
        full_determinism=False,
        enable_rollout_routing_replay=False,
        mtp=None,
        custom=None,
        get=lambda _, x: x,
    )
    made.model_config = SimpleNamespace(lora_rank=0, lora={}, processor=None)
    made._disaggregation_role = "null"
    made.replica_rank, made.node_rank, made.global_steps = 0, 0, 1
    return made


async def measure(server: Any) -> dict[str, Any]:
    engine, generate, record = server.engine, server.engine.generate, {"handed over": 0, "with text": 0}

    async def noted(*arguments: Any, sampling_params: Any, **more: Any) -> Any:
        record["with text"] += sampling_params.detokenize
        async for output in generate(*arguments, sampling_params=sampling_params, **more):
            record["handed over"] += 1
            yield output

    async def ask(index: int, **more: Any) -> list[Any]:
        sampling = {"temperature": 1.0, "logprobs": True, "seed": index, "ignore_eos": True, "max_tokens": 64, **more}
        got = await server.generate(PROMPTS[index], sampling, os.urandom(8).hex())
        return [list(got.token_ids), got.log_probs, got.stop_reason]

    engine.generate = noted
    record["whole"] = [await ask(i) for i in range(len(PROMPTS))]
    record["stopped"] = await ask(0, stop=list("0123456789"))
    record["ended"] = await ask(0, stop_token_ids=record["whole"][0][0][5:6])
    tasks, states = [asyncio.create_task(ask(i)) for i in range(len(PROMPTS))], engine.output_processor.request_states
    while sum(state.detokenizer.num_output_tokens() >= 8 for state in states.values()) < SEATS:
        await asyncio.sleep(0.001)
    record["admitting"] = server._admitting
    await server.abort_all_requests()
    record["aborted"] = await asyncio.gather(*tasks)
    await server.resume_generation()
    record["afterwards"] = await ask(1)
    engine.generate = generate
    return record


async def main() -> None:
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    from recipe.runner.verl_patches import front_end

    vllm_async_server._GATE_BARRIER_TIMEOUT_S = 0.0  # 60 s, which verl's waits for those in the queue
    arguments = vllm_async_server.AsyncEngineArgs(
        model=str(Path(__file__).parents[2] / "recipe/math/data/assets/demo_model"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=SEATS,
        enforce_eager=True,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",  # as conf/cpu.yaml
    )
    engine = vllm_async_server.AsyncLLM.from_engine_args(arguments)
    try:
        kinds = (vllm_async_server.vLLMHttpServer, front_end.vLLMHttpServer)
        print(json.dumps([await measure(server(kind, engine)) for kind in kinds]))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    os.environ.update(platform_environment("cpu"))  # before verl is imported
    asyncio.run(main())
