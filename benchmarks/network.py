"""``python -m benchmarks.network``: a network between two emulated nodes that fails for a while; docs/reliability.md.

Root only. Each node is a network namespace with a Ray node and an FSDP rank; both hang on a bridge. Its port to the
second drops all packets while it is disabled, as a switch does, or queues them as a link of 100 kB/s would. The same
command goes on with the rows that are missing in benchmarks/faults/network.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.faults import PAGE
from benchmarks.faults_run import SETTINGS, sentence
from benchmarks.pages import markdown, write_lines, write_section
from fspo.files import complete_lines
from recipe.fspo.faults.phase import read_phase
from recipe.fspo.faults.processes import kill, processes_of

ROWS: Final = PAGE.parents[1] / "benchmarks" / "faults" / "network.jsonl"
NODES: Final = ("fspo-a", "fspo-b")
BRIDGE: Final = "fspo-br"
ADDRESS: Final = "10.77.0.{}"
PORT: Final = 6390
#: Seconds, what happens to packets, and the phase in which it begins.
CELLS: Final = (
    (5, "dropped", "update"),
    (30, "dropped", "update"),
    (120, "dropped", "update"),
    (30, "dropped", "generation"),
    (5, "queued", "update"),
    (30, "queued", "update"),
    (120, "queued", "update"),
)
START_LIMIT_S, END_LIMIT_S = 300.0, 420.0
MARK: Final = "FSPO_NETWORK"


def ip(*words: str, check: bool = True) -> None:
    """``ip WORDS``."""
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def disconnect() -> None:
    """Remove both nodes and the bridge, whatever of them is there."""
    for node in NODES:
        ip("netns", "del", node, check=False)
        ip("link", "del", f"{node}-port", check=False)
    ip("link", "del", BRIDGE, check=False)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two nodes that reach each other over a bridge."""
    disconnect()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number, node in enumerate(NODES, start=1):
            ip("netns", "add", node)
            ip("link", "add", f"{node}-port", "type", "veth", "peer", "name", "eth0", "netns", node)
            ip("link", "set", f"{node}-port", "master", BRIDGE, "up")
            ip("-n", node, "addr", "add", f"{ADDRESS.format(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", node, "link", "set", device, "up")
        yield
    finally:
        disconnect()


def disturb(what: str, begin: bool) -> None:
    """Let the bridge drop or queue all packets from and to the second node, or forward them again."""
    port = f"{NODES[1]}-port"
    if what == "dropped":
        state = "0" if begin else "3"
        subprocess.run(["bridge", "link", "set", "dev", port, "state", state], check=True)
        return
    queue = ["tbf", "rate", "800kbit", "burst", "10kb", "limit", "10mb"] if begin else []
    for where, device in (([], port), (["ip", "netns", "exec", NODES[1]], "eth0")):
        change = "add" if begin else "del"
        subprocess.run([*where, "tc", "qdisc", change, "dev", device, "root", *queue], check=True)


def within(node: int, *command: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a command on a node; its output is in the folder."""
    (token := folder / "token").write_text("0" * 64)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VERL_"))}
    environment |= {MARK: str(folder), "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with (folder / f"{Path(command[0]).name}-{node}.log").open("ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", NODES[node], *command], stdout=log, stderr=log, env=environment, cwd=folder
        )


def ray_node(node: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start Ray on a node."""
    where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if node == 0 else [f"--address={head()}"]
    ray = str(Path(sys.executable).with_name("ray"))
    return within(
        node, ray, "start", "--block", "--disable-usage-stats", *where, f"--node-ip-address={ADDRESS.format(node + 1)}",
        f"--node-name={NODES[node]}", f"--temp-dir=/tmp/{NODES[node]}", "--num-cpus=16", "--num-gpus=1",
        "--object-store-memory=200000000", folder=folder,
    )  # fmt: skip


def head() -> str:
    """Address of the cluster."""
    return f"{ADDRESS.format(1)}:{PORT}"


def run_row(folder: Path, seconds: int, what: str, moment: str) -> dict[str, Any]:
    """One failure."""
    row: dict[str, Any] = {"seconds": seconds, "packets": what, "moment": moment}
    run_dir = folder / "run"
    with network():
        try:
            ray_node(0, folder)
            time.sleep(8)
            ray_node(1, folder)
            time.sleep(8)
            run = within(
                0, sys.executable, "-m", "recipe.fspo.main", *SETTINGS, f"fspo.run_dir={run_dir}", "trainer.nnodes=2",
                f"++ray_kwargs.ray_init.address={head()}", "trainer.test_freq=-1", "trainer.save_freq=1", folder=folder,
            )  # fmt: skip
            log = folder / f"{Path(sys.executable).name}-0.log"
            limit = time.monotonic() + START_LIMIT_S
            while not ((at := read_phase(run_dir)) and at.step >= 3 and at.phase == moment):
                if run.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"the run did not come to step 3:\n{log.read_text()[-3000:]}")
                time.sleep(0.01)
            began = time.monotonic()
            disturb(what, True)
            while run.poll() is None and time.monotonic() < began + seconds:
                time.sleep(0.1)
            disturb(what, False)
            while run.poll() is None and time.monotonic() < began + END_LIMIT_S:
                now = read_phase(run_dir)
                if now is not None and now.step >= at.step + 3:
                    return row | {"goes_on": True, "end_s": None, "message": ""}
                time.sleep(0.5)
            end_s = round(time.monotonic() - began, 1) if run.poll() is not None else None
            message = sentence(log.read_text(errors="replace"))
            return row | {"goes_on": False, "end_s": end_s, "message": message}
        finally:
            kill(processes_of(str(folder), variable=MARK))
            for node in NODES:
                shutil.rmtree(f"/tmp/{node}", ignore_errors=True)


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the page."""
    done, lines = {_cell(row): row for row in rows}, []
    for cell in CELLS:
        row = done.get(cell)
        became = "not run"
        if row is not None:
            ends = "**does not end**" if row["end_s"] is None else f"ends after {row['end_s']:.0f} s"
            became = "goes on" if row["goes_on"] else ends
        lines.append([cell[1], f"{cell[0]} s", cell[2], became, row["message"] if row else ""])
    return markdown(("packets are", "for", "from", "the run", "message"), lines)


def _cell(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["seconds"], row["packets"], row["moment"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=len(CELLS), help="at most so many")
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: network namespaces need root")
    done = {_cell(row) for row in complete_lines(ROWS)}
    for cell in [cell for cell in CELLS if cell not in done][: given.rows]:
        with tempfile.TemporaryDirectory(prefix="fspo-network-") as folder:
            row = run_row(Path(folder), *cell)
            row["message"] = row["message"].replace(folder, "RUN")
        print(row, flush=True)
        write_lines(ROWS, [*complete_lines(ROWS), row])
    write_section(PAGE, "network", table(complete_lines(ROWS)))


if __name__ == "__main__":
    main()
