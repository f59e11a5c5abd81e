"""Whether a SLURM job may be requeued once more (asked by ``slurm/launch.sh``).

Three requeues in a row without a new checkpoint end a job: one more start would come no farther. A preemption, the end
of the time limit and the loss of a node count alike. Each start has a folder of logs, ``JOB-restart-N``: its file
``nodes`` is written when the start begins, ``requeue`` when it ends and says why. A start that has no ``requeue`` was
ended by SLURM without a warning.

``python -m recipe.runner.checkpoints.requeues LOG_FOLDER REASON``: REASON is why this start ends. Without one the start
has just begun, and only those before it count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recipe.runner.checkpoints.integrity import latest

#: So many requeues in a row without a new checkpoint are granted.
LIMIT: Final = 3
#: Exit status if the job may not be requeued.
REFUSED: Final = 3
#: What a run prints before its folder (recipe/runner/launch/start.py), and what is looked for in the log.
RUN_FOLDER: Final = "run folder: "


@dataclass(frozen=True)
class Start:
    """One start of a job: its number, when it began and ended (seconds since 1970), and why it ended."""

    number: int
    began: float
    ended: float
    reason: str

    def __str__(self) -> str:
        return f"restart {self.number}: {(self.ended - self.began) / 60:.1f} min, {self.reason}"


def starts_of(job: str, folder: Path) -> Iterator[Start]:
    """The starts of a job whose logs lie in ``folder``, oldest first, but for the one that has just begun."""
    logs = (path for path in folder.glob(f"{job}-restart-*") if (path / "nodes").exists())
    numbered = sorted((int(number), path) for path in logs if (number := path.name.rpartition("-")[2]).isdigit())
    for number, path in numbered:
        end = path / "requeue"
        if end.exists():
            reason = end.read_text(encoding="utf-8").strip()
        else:
            # SLURM gave no time to note the end: the logs' last line came a little before.
            end = max((file for file in path.iterdir() if file.is_file()), key=lambda file: file.stat().st_mtime)
            reason = "ended by SLURM without a warning"
        yield Start(number, (path / "nodes").stat().st_mtime, end.stat().st_mtime, reason)


def run_folders(job: str, folder: Path) -> list[Path]:
    """Folders of the runs that the job's starts began, as their commands have printed them."""
    folders = dict.fromkeys(
        Path(line.removeprefix(RUN_FOLDER))
        for log in folder.glob(f"{job}-restart-*/command.log")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith(RUN_FOLDER)
    )
    return list(folders)


def newest_checkpoint(runs: Sequence[Path]) -> tuple[float, Path] | None:
    """When the newest checkpoint of these runs was written, and its folder; None without one.

    The tracker names it; the tracker's own time says nothing, because a resume may repair it.
    """
    folders = [checkpoint for run in runs if (checkpoint := latest(run / "checkpoints")) is not None]
    return max(((checkpoint.stat().st_mtime, checkpoint) for checkpoint in folders), default=None)


def refusal(job: str, folder: Path) -> str | None:
    """Why the job may not be requeued once more, and what to do; None if it may.

    Args:
        job: SLURM_JOB_ID.
        folder: Where the logs of its starts lie.
    """
    checkpoint = newest_checkpoint(run_folders(job, folder))
    in_vain = [start for start in starts_of(job, folder) if checkpoint is None or start.began > checkpoint[0]]
    if len(in_vain) <= LIMIT:
        return None
    newest = "there is none" if checkpoint is None else f"the newest is {checkpoint[1]}"
    return "\n".join(
        [
            f"{len(in_vain)} starts in a row have saved no checkpoint ({newest}), so job {job} is not requeued again:",
            *(f"  {start}" for start in in_vain),
            "Raise --time, or save sooner: a smaller trainer.save_freq, or --signal=B:USR1@SECONDS with a lead that "
            "covers one step and one save and that leaves time for the start and a step before it. If nodes were lost, "
            "see their logs. Then submit the job again with FSPO_RUN_DIR: it continues from its last checkpoint",
        ]
    )


def main() -> int:
    """Exit status: 0, or 3 if the job may not be requeued; the reason is printed then."""
    logs, reason = Path(sys.argv[1]), sys.argv[2:]
    if reason:
        (logs / "requeue").write_text(reason[0] + "\n", encoding="utf-8")
    text = refusal(logs.name.rpartition("-restart-")[0], logs.parent)
    if text is not None:
        print(text, flush=True)
    return 0 if text is None else REFUSED


if __name__ == "__main__":
    sys.exit(main())
