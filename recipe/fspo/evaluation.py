"""``evaluate=true``: generate on the validation sets with a model or checkpoint, score, print tables; no training."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, open_dict

from fspo.data.io import write_json
from fspo.evaluation import evaluate, format_table, read_records

RESULT_FILE = "evaluation.json"
_GENERATIONS = "validation"


def turn_into_evaluation(config: DictConfig) -> None:
    """Make the run validate once and end, in place; it writes to ``evaluation/`` in the run folder.

    The weights are those of ``trainer.resume_from_path`` or of the run folder's latest checkpoint; without either, the
    model itself. ``actor_rollout_ref.rollout.val_kwargs`` says how many responses per problem, and how they are drawn.
    """
    folder = Path(config.fspo.run_dir) / "evaluation"  # the training run's own files stay as they are
    with open_dict(config):
        config.fspo.run_dir = str(folder)
        config.trainer.val_before_train = True
        config.trainer.val_only = True
        config.trainer.validation_data_dir = str(folder / _GENERATIONS)


def print_evaluation(config: DictConfig) -> None:
    """Tables of avg@k and pass@k with intervals, per set and by length; the numbers go to ``evaluation.json``.

    Raises:
        FileNotFoundError: if the run left no generations.
    """
    folder = Path(config.fspo.run_dir)
    files = sorted((folder / _GENERATIONS).glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{folder / _GENERATIONS} holds no generations: the evaluation did not finish")
    result = evaluate(read_records(files[-1]), seed=config.seed)
    write_json(folder / RESULT_FILE, result)
    print(format_table(result))
    print(f"generations: {files[-1]}\nnumbers: {folder / RESULT_FILE}", flush=True)
