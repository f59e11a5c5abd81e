"""``python -m recipe.fspo.compare``: algorithms x seeds under one set of conditions, and the report on them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml
from hydra.errors import HydraException
from recipe.fspo.compare import grid, losses
from recipe.fspo.compare.grid import CLIP_VALUES, Request
from recipe.fspo.job import choices, compose
from recipe.runner.faults.preemption import INTERRUPTED
from recipe.runner.launch.commands import BadInput, as_list, refuse, split_arguments
from recipe.runner.launch.compose import key_of, text_of
from recipe.runner.launch.masking import masked_override
from recipe.runner.launch.values import name_problems

#: Settings of the command: default and meaning of each (docs/settings.md).
SETTINGS: Final = {
    "algos": ("[fspo,rloo,gspo]", "values of algo (ls conf/algo); the first is compared with the others"),
    "seeds": ("[1,2,3]", "seeds of data order and sampling"),
    "clip_values": ("[measured]", "each run measures its own; published: each loss's own; or both"),
    "advantage": ("shared", "one estimator for all, grpo, unless you give another; native: each algorithm's own"),
    "out": ("runs/compare/EXPERIMENT", "where the runs and the report go"),
    "run": ("null", "all; N: only run N, counted from 0, and no report (slurm/compare.sh)"),
    "dry_run": ("false", "true: only print what is there and what would be run; writes nothing"),
}
_ROWS: Final = "\n".join(f"  {f'{name}={default}':28} {meaning}" for name, (default, meaning) in SETTINGS.items())
USAGE: Final = f"""\
usage: python -m recipe.fspo.compare [KEY=VALUE ...] [any Hydra override of recipe.fspo.main ...]

Trains every algorithm with every seed and writes a report. Interrupted, the same command goes on where it stopped.

{_ROWS}

example: python -m recipe.fspo.compare experiment=demo algos=[fspo,rloo,gspo] seeds=[1,2,3]
Each run shares the rest of its configuration; by default fspo.match_scale=matched. A loss of your own is
one more value of algos; what it needs: docs/extending.md.
"""


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line.

    Raises:
        BadInput: for an unknown value, naming the key and the choices.
    """
    settings, parsed = split_arguments(arguments, SETTINGS)
    settings = {name: yaml.safe_load(default) for name, (default, _) in SETTINGS.items() if name != "out"} | settings
    for override in parsed:
        key, text = key_of(override), text_of(override)
        if key in ("algo", "seed", "run.dir"):
            raise BadInput(f"{text}: the grid sets {key}; give algos=[...], seeds=[...] and out=FOLDER instead")
        if (shown := masked_override(override)) != text:
            # On the command lines of the runs, which all users of the machine can read, and in grid.json.
            raise BadInput(
                f"{shown}: a grid hands its overrides on by command lines: export NAME=VALUE, and give "
                f"{text.partition('=')[0]}='${{oc.env:NAME}}' (docs/clusters.md#secrets)"
            )
    seeds = as_list(settings, "seeds")
    if not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise BadInput(f"seeds={seeds!r}: give whole numbers from 0, such as seeds=[1,2,3]")
    if (advantage := settings["advantage"]) not in ("shared", "native"):
        raise BadInput(f"advantage={advantage}: give shared or native")
    shared = ["algorithm.adv_estimator=grpo"] if advantage == "shared" else []
    overrides = [*shared, *map(text_of, parsed)]
    try:
        config = compose(overrides, SETTINGS)
    except HydraException as error:
        raise BadInput(str(error)) from None
    if problems := list(name_problems(config)):
        raise BadInput("\n".join(problems))
    if config.evaluate:
        raise BadInput("evaluate=true trains nothing: evaluate the runs of the grid one by one")
    request = Request(
        out=Path(str(settings.get("out") or f"runs/compare/{config.trainer.experiment_name}")).absolute(),
        algos=tuple(as_list(settings, "algos", choices("algo", overrides))),
        seeds=tuple(seeds),
        clip_values=tuple(as_list(settings, "clip_values", CLIP_VALUES)),
        dry_run=bool(settings["dry_run"]),
        overrides=tuple(overrides),
        only=settings["run"],
    )
    runs = len(request.runs())
    if request.only is not None and (type(request.only) is not int or not 0 <= request.only < runs):
        raise BadInput(f"run={settings['run']!r}: the grid has {runs} runs, numbered from 0 to {runs - 1}")
    losses.check(request.algos, overrides)
    return request


def main() -> None:
    """Command line."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return
    try:
        code = grid.run(parse(arguments))
    except BadInput as error:
        refuse(error)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where this one stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
