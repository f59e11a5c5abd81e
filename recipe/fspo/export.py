"""``python -m recipe.fspo.export RUN --out DIR``: a run's checkpoint in Hugging Face format, by verl's model merger."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fspo.files import atomic_folder
from recipe.fspo.checkpoints.integrity import latest


def actor_folder(path: Path) -> Path:
    """The actor's folder of a run, a ``checkpoints`` folder or one ``global_step_N`` folder (the latest checkpoint).

    Raises:
        FileNotFoundError: if there is no checkpoint at ``path``, or it is incomplete.
    """
    folder = latest(path / "checkpoints") or latest(path) or path
    actor = folder / "actor"
    if not list(actor.glob("model_world_size_*_rank_0.pt")):
        raise FileNotFoundError(
            f"{path} holds no finished checkpoint (looked for {actor}/model_world_size_*_rank_0.pt): give a run "
            "folder, its checkpoints folder, or a global_step_N folder"
        )
    return actor


def export(actor: Path, out: Path) -> None:
    """Merge the shards of ``actor`` into ``out``, which exists only once it is complete.

    Raises:
        FileExistsError: if ``out`` exists.
    """
    os.environ.setdefault("VERL_PLATFORM", "cpu")  # merging needs no accelerator, and must not look for one
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    with atomic_folder(out) as folder:
        merger = FSDPModelMerger(
            ModelMergerConfig(
                operation="merge",
                backend="fsdp",
                local_dir=str(actor),
                target_dir=str(folder),
                hf_model_config_path=str(actor / "huggingface"),
                use_cpu_initialization=True,
            )
        )
        merger.merge_and_save()
        merger.cleanup()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe.fspo.export", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, its checkpoints folder, or one global_step_N folder")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the model")
    arguments = parser.parse_args()
    try:
        export(actor_folder(arguments.run), arguments.out)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(arguments.out)


if __name__ == "__main__":
    main()
