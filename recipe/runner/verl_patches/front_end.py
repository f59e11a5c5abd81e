"""vLLM's front end hands over a response once, at its end, and without its text.

The front end is one Python process for all GPUs of a replica. As verl 0.9.1 asks, it writes the text of every token and
hands each response so far to verl, which reads the ids and log-probabilities of the last one only.

verl calls a request admitted at its first output, and an abort waits up to 60 s for all that are not. Here outputs come
only at the end, so a request is admitted once the engine has it.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout import vllm_async_server
from vllm.sampling_params import RequestOutputKind


class vLLMHttpServer(vllm_async_server.vLLMHttpServer):
    """verl's server, and of its name, which Ray's process titles and logs have."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], *rest: Any, **more: Any) -> Any:
        """As verl's; text is written only where a stop string is looked for in it."""
        asked = {"detokenize": bool(sampling_params.get("stop")), **sampling_params}
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
