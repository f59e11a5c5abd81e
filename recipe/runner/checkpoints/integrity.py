"""Looks at the checkpoint that a run is about to resume, before Ray starts.

verl writes a checkpoint's files first and its tracker file last. It does not handle an empty tracker (a crash), one
that names a missing folder (a silent start from the beginning), and damaged files (an error in one rank, or a wrong
weight). A checkpoint is torn if a file lacks the directory at its end. Bytes that have changed within a file are found
by the rank that loads it (:func:`damage_of_rank`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from fspo.files import atomic_path

# upstream: verl.trainer.ppo.v1.trainer_base "latest_checkpointed_iteration.txt"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"global_step_(\d+)")
#: File name of each kind of content (``actor.checkpoint.load_contents``) in verl's FSDP checkpoints.
# upstream: verl.utils.checkpoint.fsdp_checkpoint_manager "extra_state_world_size_{self.world_size}_rank_{self.rank}.pt"
_PREFIXES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
#: What an asynchronous mode saves of TransferQueue: the prompts under way. Written last, but for the tracker.
QUEUE = "transfer_queue"


def step_folder(root: Path, step: int) -> Path:
    """Where verl saves a step."""
    return root / f"global_step_{step}"


def unsound(files: Iterable[Path], whole: bool = False) -> list[str]:
    """A sentence for each file of ``torch.save``, a zip archive, that is damaged at its end; ``whole``, anywhere."""
    damaged = []
    for path in files:
        try:
            with zipfile.ZipFile(path) as archive:
                if whole and (part := archive.testzip()):
                    damaged.append(f"{path} is damaged (wrong checksum of {part})")
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
            # RuntimeError: a compression or a cipher that torch does not write
            damaged.append(f"{path} is missing, cut short or damaged ({error})")
    return damaged


def damage_of_rank(worker: object, folder: Path, contents: Sequence[str]) -> list[str]:
    """What is wrong with the shards that this FSDP rank (``worker`` is its actor) is about to load, each read whole.

    ``contents``: verl's ``checkpoint.load_contents`` of the role.
    """
    import torch.distributed as dist

    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    names = [f"{prefix}_{suffix}" for kind, prefix in _PREFIXES.items() if kind in contents]
    # What is missing verl says itself; another engine's files have other names.
    return unsound((folder / name for name in names if (folder / name).exists()), whole=True)


@dataclass(frozen=True)
class Checkpoint:
    """A folder ``global_step_N``, which may not be there."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def step(self) -> int:
        """0 of a folder with another name, which :func:`resume_problems` refuses."""
        match = _FOLDER.fullmatch(self.folder.name)
        return int(match[1]) if match else 0

    def problems(self, ranks: int, contents: Sequence[str]) -> list[str]:
        """What keeps a run of so many FSDP ranks, with these contents, from resuming it, a sentence each."""
        shards = [path.name for path in (self.folder / "actor").glob("*_world_size_*_rank_*.pt")]
        if shards and not any(f"_world_size_{ranks}_rank_" in name for name in shards):
            return [
                f"{self} was saved by another number of FSDP ranks ({shards[0]}), this run has {ranks}: use as many "
                "(trainer.nnodes * trainer.n_gpus_per_node)"
            ]
        names = [prefix for kind, prefix in _PREFIXES.items() if kind in contents]
        needed = [self.folder / f"actor/{n}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks) for n in names]
        own = {self.folder / "data.pt", *self.folder.glob("*.pt")}  # verl's, and a recipe's
        without_queue = QUEUE in contents and not (self.folder / QUEUE / "metadata.json").is_file()
        return [*unsound([*needed, *sorted(own)]), *[f"{self.folder / QUEUE} is missing"] * without_queue]


def checkpoints(root: Path) -> list[Checkpoint]:
    """Those in ``root``, the newest first."""
    folders = (path for path in root.glob("global_step_*") if _FOLDER.fullmatch(path.name))
    return sorted(map(Checkpoint, folders), key=lambda checkpoint: checkpoint.step, reverse=True)


def newest_complete(root: Path, ranks: int, contents: Sequence[str]) -> Checkpoint | None:
    """The newest checkpoint in ``root`` without :meth:`Checkpoint.problems`."""
    return next((checkpoint for checkpoint in checkpoints(root) if not checkpoint.problems(ranks, contents)), None)


def remove_old(root: Path, step: int, keep: int) -> None:
    """Make place for the save of ``step``: of those before it the newest ``keep - 1`` whole ones stay, and the latest.

    verl removes only what one process has saved. If all look damaged, nothing is: a file system may fail for a moment.
    """
    old = [checkpoint for checkpoint in checkpoints(root) if checkpoint.step < step]
    whole = [one for one in old if not unsound({one.folder / "data.pt", *one.folder.rglob("*.pt")})]
    kept = (*whole[: keep - 1], latest(root))
    for checkpoint in old if whole else ():
        if checkpoint not in kept:
            shutil.rmtree(checkpoint.folder, ignore_errors=True)


def _needs(trainer: DictConfig, contents: Sequence[str] | None, own: bool = True) -> tuple[int, list[str]]:
    """Arguments of :meth:`Checkpoint.problems`, for one of the run's own or one that it begins with."""
    queue = own and "async" in trainer.v1.trainer_mode  # verl would go on without the prompts under way, unsaid
    return trainer.nnodes * trainer.n_gpus_per_node, [*(contents or _PREFIXES), *[QUEUE] * queue]


def tracked(root: Path) -> Checkpoint | None:
    """The checkpoint that the tracker names, there or not; None if there is no tracker or it holds no number."""
    with contextlib.suppress(OSError, ValueError):
        return Checkpoint(step_folder(root, int((root / TRACKER_FILE).read_bytes())))
    return None


def latest(root: Path) -> Checkpoint | None:
    """The checkpoint that the tracker names, if it is there."""
    named = tracked(root)
    return named if named and named.folder.is_dir() else None


def resumed_from(trainer: DictConfig) -> Checkpoint | None:
    """The checkpoint that a start continues from, as verl will find it; None if it begins anew."""
    if trainer.resume_mode == "resume_path":
        return Checkpoint(Path(trainer.resume_from_path or ""))
    return tracked(Path(trainer.default_local_dir)) if trainer.resume_mode == "auto" else None


def is_checkpoint_of(trainer: DictConfig, path: str | Path | None) -> bool:
    """Whether this is the path of one of the run's own checkpoints."""
    saved = os.path.abspath(trainer.default_local_dir)
    return bool(path) and os.path.dirname(os.path.abspath(path)) == saved


def name_latest(checkpoint: Checkpoint) -> None:
    """Make the tracker beside a checkpoint name it."""
    with atomic_path(checkpoint.folder.parent / TRACKER_FILE) as temporary:
        temporary.write_text(str(checkpoint.step), encoding="utf-8")


def tracker_repair(trainer: DictConfig, contents: Sequence[str] | None) -> tuple[str, Checkpoint] | None:
    """What a start does about a tracker that is missing or unreadable: a sentence, and the newest complete checkpoint,
    which the start lets the tracker name (:func:`name_latest`); None if there is nothing to do, or nothing complete.

    ``contents``: verl's ``actor.checkpoint.load_contents``, None for all.
    """
    root = Path(trainer.default_local_dir)
    if trainer.resume_mode != "auto" or tracked(root) is not None:
        return None
    if (newest := newest_complete(root, *_needs(trainer, contents))) is None:
        return None  # where a tracker is, something was complete once: see resume_problems
    return f"{root / TRACKER_FILE} names no step (a save was interrupted): it names {newest.folder.name} again", newest


def resume_problems(
    trainer: DictConfig, contents: Sequence[str] | None, checkpoint: Checkpoint | None
) -> Iterator[str]:
    """Why ``checkpoint``, which the run would resume (:func:`resumed_from`), cannot be, a sentence each."""
    root, problems = Path(trainer.default_local_dir), list[str]()
    remedy = "begin again with another trainer.default_local_dir, or correct trainer.resume_from_path"
    needs = _needs(trainer, contents, own=checkpoint is None or is_checkpoint_of(trainer, checkpoint.folder))
    if checkpoint is not None:
        problems = checkpoint.problems(*needs) if checkpoint.folder.is_dir() else [f"{checkpoint} does not exist"]
        if not _FOLDER.fullmatch(checkpoint.folder.name):
            problems = [f"{checkpoint} does not end in global_step_N"]
        elif problems and (other := newest_complete(checkpoint.folder.parent, *needs)):
            remedy = f"resume the newest whole one: trainer.resume_mode=resume_path trainer.resume_from_path={other}"
    elif trainer.resume_mode == "auto" and (root / TRACKER_FILE).exists():
        damage = [text for saved in checkpoints(root) for text in saved.problems(*needs)]
        problems = [f"{root / TRACKER_FILE} names no step ({'; '.join(damage[:3])})"]
    for problem in problems:
        yield f"the checkpoint cannot be resumed: {problem}; {remedy}"
