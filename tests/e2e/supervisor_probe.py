"""A program: two Ray nodes on this machine, a worker on the second; that, and then the node, is killed.

Prints the sentence of the failure that the launching process is told of each time.
"""

from __future__ import annotations

import os
import queue
import threading

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.runner.faults.errors import Failure
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.faults.supervisor import OtherNodes

MARK = "node-watch-probe"


@ray.remote(num_cpus=0)
class WorkerDict:
    """Named as verl's FSDP workers are."""

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    options = {"num_cpus": 2, "object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    second = cluster.add_node(**options)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, runtime_env={"env_vars": {RUN_ID_VARIABLE: MARK}}, log_to_driver=False)
    there = NodeAffinitySchedulingStrategy(second.node_id, soft=False)
    failures: queue.Queue[Failure] = queue.Queue()
    nodes = OtherNodes(MARK, lambda: Phase(3, "generation", 0.0), failures.put, threading.Event())
    nodes.start()
    raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
    for victim in (None, raylet):
        worker = WorkerDict.options(scheduling_strategy=there).remote()
        pid = ray.get(worker.pid.remote())
        psutil.Process(pid).suspend()
        while not (stopped := nodes.stopped()):  # until the watcher there has seen it; a death ends a watcher
            threading.Event().wait(0.1)
        psutil.Process(pid).resume()
        (victim or psutil.Process(pid)).kill()
        print(f"killed {'the node' if victim else pid}: {failures.get(timeout=60).sentence}", flush=True)
        print(f"stopped: {stopped[0]}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # Cluster's own clean-up at exit waits for processes that are gone
