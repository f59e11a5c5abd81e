"""Which rank the others wait for in a collective, by PyTorch's flight recorder, which keeps the last 2000 of a rank.

A stack does not tell that on GPUs, where a rank goes on after a collective that has not happened, and waits elsewhere.
A rank answers a hang watch through a socket. NCCL, which ends a rank after half an hour in one collective, writes the
same records of all ranks to the run folder before. Defined here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.runner.faults.processes import RUN_ID_VARIABLE

#: What the recorder has of one rank: by process group and number in it, what it entered and whether that is done.
Entered = dict[str, dict[int, tuple[str, bool]]]
DUMP = "collectives_rank"
_ANSWER_S = 5.0


def answer(rank: int) -> None:
    """Tell whoever connects which collectives this rank has entered; in a thread, as the rank itself may wait."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(os.environ.get(RUN_ID_VARIABLE, ""), os.getpid()))
    except OSError:
        return  # another worker of this process answers already
    listener.listen()

    def serve() -> None:
        while True:
            with listener.accept()[0] as asked, contextlib.suppress(OSError):
                asked.sendall(json.dumps([rank, entered_here()]).encode())

    threading.Thread(target=serve, daemon=True, name="collectives").start()


def dump_to(run_dir: Path, rank: int) -> None:
    """Have NCCL write this rank's records there when a collective takes too long."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(run_dir / DUMP)  # the number of the rank is added
    (run_dir / f"{DUMP}{rank}").unlink(missing_ok=True)  # of an earlier start


def ask(run_id: str, pid: int) -> tuple[int, Entered] | None:
    """The rank of a process on this machine, and what it has entered; None if it does not answer."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_ANSWER_S)
        asking.connect(_address(run_id, pid))
        with asking.makefile("rb") as said:
            rank, entered = json.loads(said.read())
        return rank, {group: {int(n): tuple(one) for n, one in of.items()} for group, of in entered.items()}
    return None


def told_by_dumps(run_dir: Path) -> str | None:
    """The sentence on the missing ranks, by what NCCL has written there."""
    ranks = {}
    for path in run_dir.glob(f"{DUMP}*"):
        with contextlib.suppress(OSError, ValueError, pickle.UnpicklingError, EOFError):  # half-written
            ranks[int(path.name.removeprefix(DUMP))] = _entered(pickle.loads(path.read_bytes()))
    absent, says = missing(ranks) or ([], "")
    return f"rank {', '.join(map(str, absent))} {says}" if absent else None


def entered_here() -> Entered:
    """Of this process."""
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]  # of gloo; of NCCL
    entered: Entered = {}
    for dump in filter(None, dumps):
        entered |= _entered(pickle.loads(dump(includeStackTraces=False)))
    return entered


def missing(ranks: Mapping[int, Entered]) -> tuple[list[int], str] | None:
    """The ranks that others wait for, and what to say of them; None if no collective tells.

    In a group, the earliest collective that a rank has entered and that is not done is the one in which they wait.
    Missing are the ranks of the group that are not so far, or else the fewest that entered another under its number. Of
    several groups that counts whose missing ranks wait in no other.
    """
    found = []
    for group in sorted({group for entered in ranks.values() for group in entered}):
        members = {rank: entered[group] for rank, entered in ranks.items() if group in entered}
        if not (waited := [n for of in members.values() if (n := _waits_in(of)) is not None]):
            continue
        number = min(waited)
        what = {rank: of[number][0] for rank, of in members.items() if number in of}
        common = Counter(what.values()).most_common(1)[0][0]
        if behind := [rank for rank, of in members.items() if max(of) < number]:
            says = f"has not entered {common}, collective {number} of {group}, in which others wait"
        elif behind := [rank for rank, each in what.items() if each != common]:
            says = f"is in {what[behind[0]]}, others in {common}, as collective {number} of {group}"
        else:
            continue
        waits = any(_waits_in(of) is not None for rank in behind for of in ranks[rank].values())
        found.append((waits, behind, says))
    return min(found, key=lambda each: each[0])[1:] if found else None


def _waits_in(entered: Mapping[int, tuple[str, bool]]) -> int | None:
    """The first collective of a group that is not done; what is older than one that is done was only not marked."""
    last = max((number for number, (_, done) in entered.items() if done), default=-1)
    return min((number for number in entered if number > last), default=None)


def _address(run_id: str, pid: int) -> str:
    return f"\0fspo-{run_id}-{pid}"  # in no folder, and gone with the process


def _entered(recorded: Mapping[str, Any]) -> Entered:
    entered: Entered = {}
    for entry in recorded["entries"]:
        backend, _, what = entry["profiling_name"].partition(":")
        group = f"{backend}'s group {' '.join(entry['process_group'])}"  # its number and what it is for
        if not entry["is_p2p"]:
            done = bool(entry["retired"]) or entry["state"] == "completed"
            entered.setdefault(group, {})[entry["collective_seq_id"]] = (what, done)
    return entered
