"""vLLM's front end hands over a response once, at its end, and without its text.

The front end is one Python process for all GPUs of a replica. As verl 0.9.1 asks, it writes the text of every token and
hands each response so far to verl, which reads the ids and log-probabilities of the last one only.

verl counts a request as admitted once something of its response has come, and an abort waits, for 60 s at most, until
none is left that the engine may not know yet. With nothing before the end it would wait for every response, as it does
today for those that queue in the engine. Here a request is admitted once the engine has it.

All requests of a run come through here, in training and in validation, in every mode: here they get its stop tokens
(:mod:`recipe.runner.launch.end_of_turn`). As eos does, such a token ends the response and is a part of it.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout import vllm_async_server
from vllm.sampling_params import RequestOutputKind


class vLLMHttpServer(vllm_async_server.vLLMHttpServer):
    """verl's server, and of its name, which Ray's process titles and logs have."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], *rest: Any, **more: Any) -> Any:
        """As verl's; text is written only where a stop string is looked for in it, the run's stop tokens are added."""
        asked = {"detokenize": bool(sampling_params.get("stop")), **sampling_params}
        stops = (*(asked.get("stop_token_ids") or ()), *((self.config.custom or {}).get("stop_token_ids") or ()))
        asked["stop_token_ids"] = list(dict.fromkeys(stops))
        return await super().generate(prompt_ids, {**asked, "output_kind": RequestOutputKind.FINAL_ONLY}, *rest, **more)

    @property
    def _admitting(self) -> int:
        return self._unanswered - self._in_engine()

    @_admitting.setter
    def _admitting(self, value: int) -> None:
        self._unanswered = value + self._in_engine()

    def _in_engine(self) -> int:
        return len(self.engine.output_processor.request_states) if hasattr(self, "engine") else 0


class Replica(vllm_async_server.vLLMReplica):
    """verl's replica with that server."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.server_class = ray.remote(vLLMHttpServer)
