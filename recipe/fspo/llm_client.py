"""Where an agent loop sends its responses to be generated when there is only one vLLM server."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient


class OneServerClient(LLMServerClient):
    """verl's client, which asks the load balancer once instead of twice for every response."""

    _server: tuple[str, Any] | None = None

    async def _acquire_server(self, request_id: str, **fields: Any) -> tuple[str, Any]:
        if self._server is None:
            self._server = await super()._acquire_server(request_id, **fields)
        return self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Nothing to release: nobody counts."""
