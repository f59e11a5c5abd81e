"""``python -m recipe.runner.export RUN --out DIR``: a run's checkpoint in Hugging Face format, by verl's model merger.

A LoRA adapter is merged into the weights: the exported model is the policy that was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from fspo.files import atomic_folder, remove_folder
from recipe.runner.checkpoints.integrity import latest, unsound

#: Where verl's merger puts the adapter of a LoRA run.
_ADAPTER = "lora_adapter"
#: Where verl saves its scale.
_SCALE = "lora_train_meta.json"


def actor_folder(path: Path) -> Path:
    """The actor's folder of a run (its latest checkpoint) or of one ``global_step_N`` folder.

    Raises:
        FileNotFoundError: if there is no checkpoint at ``path``, or it is incomplete.
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

    Raises:
        OSError: if ``out`` exists, or a shard is damaged.
        ValueError: if a LoRA adapter cannot be merged.
        subprocess.CalledProcessError: if verl's merger fails, which says why on stderr.
    """
    if damage := unsound(sorted(actor.glob("model_world_size_*.pt")), whole=True):
        raise OSError(f"{damage[0]}: give another global_step_N folder, or copy this one again")
    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--use_cpu_initialization"]
    environment = {"VERL_PLATFORM": "cpu"} | os.environ  # merging needs no accelerator, and must not look for one
    with atomic_folder(out) as folder:
        subprocess.run([*merge, "--local_dir", actor, "--target_dir", folder], env=environment, check=True)
        if (folder / _ADAPTER).is_dir():
            merge_adapter(folder, actor / _SCALE)


def merge_adapter(folder: Path, scale: Path = Path(_SCALE)) -> None:
    """Add the adapter that verl's merger has put beside the base weights of ``folder`` to them, in place.

    W + (alpha / r) B A for every adapted matrix, in float32, saved as bfloat16 like every export of verl's merger.

    Args:
        folder: What verl's merger has written, with 0 for an alpha that it does not know.
        scale: The file from which the merger takes r and alpha.

    Raises:
        ValueError: if the adapter's alpha or the base weights are missing.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = folder / _ADAPTER
    if not json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"]:
        if not scale.is_file():
            raise ValueError(
                f"{scale} is missing, which holds the scale of the adapter: copy the checkpoint again, or give another "
                "global_step_N folder"
            )
        raise ValueError(
            f"{scale} has no lora_alpha above 0, so the scale of the adapter is not known. verl saves the whole part "
            "of actor_rollout_ref.model.lora_alpha: write the one of the training into the file if it was a whole "
            "number, otherwise train with one"
        )
    base, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(f"the checkpoint holds an adapter without its base weights ({missing[0]}, ...)")
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.to(torch.bfloat16).save_pretrained(folder)
    remove_folder(adapter)  # nobody is to add it twice


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe.runner.export", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, its checkpoints folder, or one global_step_N folder")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the model")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half-written goes
    try:
        export(actor_folder(arguments.run), arguments.out)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    print(f"{arguments.out}: the model, whose weights verl's merger writes in bfloat16")


if __name__ == "__main__":
    main()
