"""Names of the sockets through which a node's weights go to vLLM: unique on the machine."""

from __future__ import annotations

import functools
import zlib
from typing import Any


def name_sockets_by_ray() -> None:
    """Add the address of its Ray to what Ray says of its job.

    verl 0.9.1 names the socket in /tmp through which a node's weights go to vLLM by that number, as if it were unique
    on the machine. It counts from 1 in every Ray: of two runs at a time on one machine, each with a Ray of its own, one
    receives the other's weights, or both wait for ever (seen). verl asks for the number nowhere else, and has no hook.
    """
    from ray.runtime_context import RuntimeContext

    original = RuntimeContext.get_job_id

    @functools.wraps(original)
    def get_job_id(self: Any) -> str:
        try:
            address = self.gcs_address
        except AttributeError:  # of Ray's client, which has no part in a node's sockets
            return original(self)
        return f"{original(self)}-{zlib.crc32(address.encode()):08x}"

    RuntimeContext.get_job_id = get_job_id
