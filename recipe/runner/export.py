"""``python -m recipe.runner.export RUN --out DIR``: a run's checkpoint in Hugging Face format, by verl's model merger.

verl's merger puts the adapter of a LoRA run beside the base weights, in ``DIR/lora_adapter`` (docs/runs.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe.runner.checkpoints.integrity import latest, unsound


def actor_folder(path: Path) -> Path:
    """The actor's folder of a run (its latest checkpoint) or of one ``global_step_N`` folder.

    Raises FileNotFoundError if there is no checkpoint at ``path``, or it is incomplete.
    """
    checkpoint = latest(path)
    actor = (checkpoint.folder if checkpoint else path) / "actor"
    if not list(actor.glob("model_world_size_*_rank_0.pt")):
        raise FileNotFoundError(
            f"{path} holds no finished checkpoint (looked for {actor}/model_world_size_*_rank_0.pt): give a run "
            "folder, or a global_step_N folder"
        )
    return actor


def export(actor: Path, out: Path) -> None:
    """Merge the shards of ``actor`` into ``out``, which exists only once it is complete.

    Raises OSError if ``out`` exists, or a shard is damaged; subprocess.CalledProcessError if verl's merger fails, which
    says why on stderr.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: give a new folder, or remove it first")
    if damage := unsound(sorted(actor.glob("model_world_size_*.pt")), whole=True):
        raise OSError(f"{damage[0]}: give another global_step_N folder, or copy this one again")
    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--use_cpu_initialization"]
    environment = {"VERL_PLATFORM": "cpu"} | os.environ  # merging needs no accelerator, and must not look for one
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary, out.name)
        subprocess.run([*merge, "--local_dir", actor, "--target_dir", folder], env=environment, check=True)
        os.rename(folder, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe.runner.export", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, its checkpoints folder, or one global_step_N folder")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the model")
    arguments = parser.parse_args()
    try:
        export(actor_folder(arguments.run), arguments.out)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{arguments.out}: the model, whose weights verl's merger writes in bfloat16")
    if (adapter := arguments.out / "lora_adapter").is_dir():
        print(f"note: these are the base weights; {adapter} is what was trained: add it by PEFT (docs/runs.md)")


if __name__ == "__main__":
    main()
