"""Loaded by verl in every process that imports it, through the ``verl.plugins`` entry point.

Selects nothing and starts nothing: it makes the CPU platform known where ``VERL_PLATFORM=cpu`` (never on a GPU run),
and gives each Ray's sockets names of their own. In a run of the runner's its processes also write their stacks when
asked.
"""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any

from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.faults.stacks import write_when_asked

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import recipe.runner.cpu.platform  # noqa: F401  (registers the platform)
    from recipe.runner.cpu.patches import merge_duplicate_process_group_backend, report_vllm_version

    merge_duplicate_process_group_backend()
    report_vllm_version()


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


name_sockets_by_ray()
if RUN_ID_VARIABLE in os.environ:
    write_when_asked()
