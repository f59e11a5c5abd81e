"""``python -m recipe.fspo.wait_for_nodes NODE [NODE ...]``: returns once these nodes are in Ray, or names the missing.

For ``slurm/launch.sh``: the names are those given to ``ray start --node-name``, the cluster is the one of RAY_ADDRESS.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import ray


def missing_nodes(wanted: Iterable[str], alive: Iterable[str]) -> list[str]:
    """The wanted nodes that are not alive, in their order."""
    present = set(alive)
    return [name for name in wanted if name not in present]


def alive_nodes() -> list[str]:
    """Names of the nodes in Ray; none while it cannot be reached."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="warning")
        except ConnectionError:
            return []
    return [node["NodeName"] for node in ray.nodes() if node["Alive"]]


def main() -> int:
    """Exit status: 0, or 1 if a node has not joined in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="+", metavar="NODE")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds")
    arguments = parser.parse_args()
    started, next_word = time.monotonic(), 0.0
    while lacking := missing_nodes(arguments.nodes, alive_nodes()):
        waited = time.monotonic() - started
        if waited >= arguments.timeout:
            print(f"{', '.join(lacking)} did not join Ray within {waited:.0f} s (FSPO_READY_TIMEOUT)", flush=True)
            return 1
        if waited >= next_word:
            print(f"waiting for {', '.join(lacking)}, {waited:.0f} of {arguments.timeout:.0f} s", flush=True)
            next_word = waited + 10
        time.sleep(1)
    print(f"{len(arguments.nodes)} node(s) in Ray", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
