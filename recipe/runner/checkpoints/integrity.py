"""Looks at the checkpoint that a run is about to resume, before Ray starts.

verl writes a checkpoint's files first and its tracker file last, so a save that was killed leaves the tracker naming
the checkpoint before. What verl does not handle: an empty tracker (a crash), a tracker that names a missing folder (a
silent start from the beginning), and damaged files (an error minutes later, in one rank, or a wrong weight).

A file that was cut short lacks the directory at its end; that is all that is looked at before a start and before a
save. Bytes that have changed within a file are found by whoever loads it (:func:`unsound`, :func:`damage_of_rank`),
because only that process reads it whole anyway. They are noted in the checkpoint, and the next start passes it over.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from fspo.files import atomic_path, remove_folder
from fspo.reading import read_text

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"global_step_(\d+)")
#: File name of each kind of content (``actor.checkpoint.load_contents``) in verl's FSDP checkpoints.
_PREFIXES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
#: What an asynchronous mode saves of TransferQueue: the prompts under way. Written last, but for the tracker.
QUEUE = "transfer_queue"
#: In a checkpoint: the damage that a start has seen while it loaded the files. The next save of the step removes it.
DAMAGE_FILE = "damaged.txt"


#: In place of damage: a file system may fail for a moment.
UNREADABLE = "cannot be read"


def step_folder(root: Path, step: int) -> Path:
    """Where verl saves a step."""
    return root / f"global_step_{step}"


def step_of(folder: Path) -> int:
    """The step that a folder of :func:`step_folder` holds."""
    return int(folder.name.removeprefix("global_step_"))


def archive_damage(path: Path, whole: bool = False) -> str | None:
    """What is wrong with a file of ``torch.save`` (a zip archive); None if it looks sound.

    With ``whole`` the file is read and every checksum compared. Without, only its end is looked at.
    """
    if not path.is_file():
        return "is missing"
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                return "is damaged (it has no directory at its end: it was cut short)"
            if not whole:
                return None
            with zipfile.ZipFile(file) as archive:
                bad = archive.testzip()
    except OSError as error:
        return f"{UNREADABLE} ({error})"
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        return f"is damaged ({error})"  # RuntimeError: also a compression or a cipher that torch does not write
    return f"is damaged (wrong checksum of {bad})" if bad else None


def unsound(files: Iterable[Path], whole: bool = False) -> list[str]:
    """A sentence for each damaged file; see :func:`archive_damage`."""
    return [f"{path} {damage}" for path in files if (damage := archive_damage(path, whole)) is not None]


def damage_of_rank(worker: object, folder: Path, contents: Sequence[str]) -> list[str]:
    """What is wrong with the shards that this FSDP rank is about to load from ``folder``, each read whole.

    Called in the rank's own process (``worker`` is its actor), so that all ranks read at a time. ``contents`` are
    verl's ``checkpoint.load_contents`` of the role.
    """
    import torch.distributed as dist

    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    names = [f"{prefix}_{suffix}" for kind, prefix in _PREFIXES.items() if kind in contents]
    # What is missing verl says itself; another engine's files have other names.
    return unsound((folder / name for name in names if (folder / name).exists()), whole=True)


def note_damage(folder: Path, damage: Sequence[str]) -> bool:
    """Write into a checkpoint what is wrong with it: the next start looks for it.

    Returns:
        Whether it is noted; not where it cannot be written, nor where a file could not be read, which may pass.
    """
    if any(f" {UNREADABLE} (" in sentence for sentence in damage):
        return False
    try:
        with atomic_path(folder / DAMAGE_FILE) as temporary:
            temporary.write_text("".join(f"{sentence}\n" for sentence in damage), encoding="utf-8")
    except OSError:
        return False
    return True


def noted_damage(folder: Path) -> list[str]:
    """What :func:`note_damage` has written, and what to do once the file is mended."""
    with suppress(OSError):
        damage = read_text(folder / DAMAGE_FILE).splitlines()
        return [
            f"{sentence}, as a start saw that loaded it (remove {folder / DAMAGE_FILE} once it is mended)"
            for sentence in damage
        ]
    return []


def checkpoint_damage(folder: Path, world_size: int, contents: Sequence[str]) -> list[str]:
    """Everything that keeps ``folder`` (``.../global_step_N``) from being resumed, one sentence a problem.

    Args:
        folder: The checkpoint.
        world_size: FSDP ranks of the run that would resume it.
        contents: verl's ``actor.checkpoint.load_contents``, and ``QUEUE`` where prompts under way belong to it.
    """
    if noted := noted_damage(folder):
        return noted
    matches = (re.search(r"_world_size_(\d+)_rank_", path.name) for path in (folder / "actor").glob("*.pt"))
    saved_by = {int(match[1]) for match in matches if match}
    if saved_by and world_size not in saved_by:
        ranks = ", ".join(map(str, sorted(saved_by)))
        return [
            f"{folder} was saved by {ranks} FSDP rank(s) and this run has {world_size}: use as many "
            "(trainer.nnodes * trainer.n_gpus_per_node)"
        ]
    names = [prefix for kind, prefix in _PREFIXES.items() if kind in contents]
    files = [folder / f"actor/{n}_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size) for n in names]
    files += sorted({folder / "data.pt", *folder.glob("*.pt")})  # a recipe may keep files of its own
    damaged = unsound(files)
    if QUEUE in contents and not (folder / QUEUE / "metadata.json").is_file():
        damaged.append(f"{folder / QUEUE} is missing")
    return damaged


def _step_folders(root: Path) -> dict[int, Path]:
    """Checkpoint folders by step, the newest first."""
    folders = {int(match[1]): path for path in root.glob("global_step_*") if (match := _FOLDER.fullmatch(path.name))}
    return dict(sorted(folders.items(), reverse=True))


def newest_complete(root: Path, world_size: int, contents: Sequence[str]) -> Path | None:
    """The newest checkpoint in ``root`` without damage."""
    folders = _step_folders(root).values()
    return next((folder for folder in folders if not checkpoint_damage(folder, world_size, contents)), None)


def remove_old(root: Path, step: int, keep: int) -> None:
    """Make place for the save of ``step``: of those before it the newest ``keep - 1`` whole ones stay, and the latest.

    verl does so for those that one process has saved: without this, every requeue of a job would leave two behind. And
    what a save that was killed has left would count as one. If all look damaged, nothing is deleted: a file system may
    fail for a moment. ``root`` holds all checkpoints; ``keep`` is verl's ``max_actor_ckpt_to_keep``, at least 2.
    """
    old = [folder for saved, folder in _step_folders(root).items() if saved < step]
    whole = [
        folder
        for folder in old
        if not noted_damage(folder) and not unsound([folder / "data.pt", *folder.rglob("*.pt")])
    ]
    for folder in old if whole else ():
        if folder not in (*whole[: keep - 1], latest(root)):
            remove_folder(folder, ignore_errors=True)


def _needs(trainer: DictConfig, contents: Sequence[str] | None, own: bool = True) -> tuple[int, list[str]]:
    """Arguments of :func:`checkpoint_damage`; ``own``: of a checkpoint of this run, not of one that it begins with."""
    queue = own and "async" in trainer.v1.trainer_mode  # verl would go on without the prompts under way, unsaid
    return trainer.nnodes * trainer.n_gpus_per_node, [*(contents or _PREFIXES), *[QUEUE] * queue]


def tracked_step(root: Path) -> int | None:
    """The step that the tracker names; None if there is no tracker or it holds no number."""
    try:
        return int(read_text(root / TRACKER_FILE, limit=100))
    except (OSError, ValueError):
        return None


def latest(root: Path) -> Path | None:
    """The checkpoint that the tracker names, if it is there."""
    step = tracked_step(root)
    return step_folder(root, step) if step is not None and step_folder(root, step).is_dir() else None


def resumed_from(trainer: DictConfig) -> Path | None:
    """The checkpoint that a start continues from, as verl will find it; None if it begins anew."""
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path or "")
    root = Path(trainer.default_local_dir)
    step = tracked_step(root) if trainer.resume_mode == "auto" else None
    return None if step is None else step_folder(root, step)


def is_checkpoint_of(trainer: DictConfig, path: str | Path | None) -> bool:
    """Whether this is the path of one of the run's own checkpoints."""
    saved = os.path.abspath(trainer.default_local_dir)
    return bool(path) and os.path.dirname(os.path.abspath(path)) == saved


def name_latest(folder: Path) -> None:
    """Make the tracker beside a checkpoint name it."""
    with atomic_path(folder.parent / TRACKER_FILE) as temporary:
        temporary.write_text(str(step_of(folder)), encoding="utf-8")


def repair_tracker(trainer: DictConfig, contents: Sequence[str] | None) -> str | None:
    """Make a tracker file name the newest complete checkpoint, if it is missing or unreadable, or if a start has noted
    damage of the checkpoint that it names.

    Args:
        trainer: verl's group of that name.
        contents: verl's ``actor.checkpoint.load_contents``; None: all.

    Returns:
        What was wrong and is done, for the person who watches; None if there was nothing to do.
    """
    root = Path(trainer.default_local_dir)
    tracker = root / TRACKER_FILE
    if trainer.resume_mode != "auto":
        return None
    if tracked_step(root) is None:
        why = f"{tracker} {'names no step' if tracker.exists() else 'is missing'} (a save was interrupted)"
    elif (named := latest(root)) is not None and (noted := noted_damage(named)):
        why = "; ".join(noted)
    else:
        return None
    newest = newest_complete(root, *_needs(trainer, contents))
    if newest is not None:
        name_latest(newest)
        return f"{why}: {tracker.name} names {newest.name} again, the newest complete checkpoint"
    if tracker.exists() or not _step_folders(root):
        return None  # with a tracker something was complete once: not for us to begin again, see resume_problems
    return f"{why}, and {root} holds no complete checkpoint: starting as the run began"


def resume_problems(trainer: DictConfig, contents: Sequence[str] | None, folder: Path | None) -> Iterator[str]:
    """One sentence for each reason why ``folder``, which the run would resume (:func:`resumed_from`), cannot be.

    The other arguments are those of :func:`repair_tracker`. A whole checkpoint is read once: another one is looked for
    only where this one is damaged.
    """
    root = Path(trainer.default_local_dir)
    needs = _needs(trainer, contents, own=folder is None or is_checkpoint_of(trainer, folder))
    if folder is not None and not _FOLDER.fullmatch(folder.name):
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path!r} does not end in global_step_N: give the "
            "folder of one checkpoint"
        )
        return
    if folder is not None:
        problems = checkpoint_damage(folder, *needs) if folder.is_dir() else [f"{folder} does not exist"]
    elif trainer.resume_mode == "auto" and (root / TRACKER_FILE).exists():
        damage = {saved: checkpoint_damage(saved, *needs) for saved in _step_folders(root).values()}
        if not all(damage.values()):
            return  # the tracker is repaired where the run starts
        texts = [text for sentences in damage.values() for text in sentences]
        problems = [f"{root / TRACKER_FILE} names no step ({'; '.join(texts[:3])})"]
    else:
        return
    if not problems:
        return
    other = newest_complete(folder.parent, *needs) if folder else None
    if other and folder and trainer.resume_mode == "auto" and noted_damage(folder):
        return  # the tracker is repaired where the run starts
    remedy = (
        f"resume the newest complete one with trainer.resume_mode=resume_path trainer.resume_from_path={other}"
        if other
        else "begin again with another run.dir"
    )
    for problem in problems:
        yield f"the checkpoint cannot be resumed: {problem}; {remedy}"
