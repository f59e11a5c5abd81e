"""``python -m benchmarks.alignment RUN``: what clipping does to the direction of a checkpoint's policy gradient."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fspo.losses import resolve_settings
from fspo.records import CONFIG_FILE
from recipe.fspo import CONF_DIR
from recipe.fspo.job import JOB as TRAINING
from recipe.fspo.job import choices
from recipe.runner.checkpoints.integrity import checkpoint_damage
from recipe.runner.export import actor_folder
from recipe.runner.faults.preemption import watch_for_warning
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.launch.commands import BAD_INPUT, BadInput, as_list, check_share, launch_or_exit, split_arguments
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import WrongMachineError, export_platform
from recipe.runner.launch.run_settings import moved

FOLDER: Final = "alignment"
ROOT: Final = Path(__file__).resolve().parents[2]

USAGE: Final = """\
usage: python -m benchmarks.alignment RUN [KEY=VALUE ...]

Measures, on real rollouts of a saved checkpoint, the cosine between the clipped and the unclipped policy gradient of
each algorithm, with its default clips and with acceptance-matched ones, and against a held-out gradient, next to the
bound by kappa, LRE_max and eta (docs/results.md). Writes RUN/alignment/alignment.json; trains nothing, and changes no
other file of the run.

  RUN                       a run folder (its latest checkpoint), or one global_step_N folder in its checkpoints folder
  algos=[fspo,rloo,gspo]    sequence-level algorithms with a fixed band (ls conf/algo)
  rounds=1                  independent repetitions, each from the checkpoint with fresh prompts
  updates=2                 mini-batch updates with the run's own loss before the gradients are measured: S is 0 before
  prompts=64                measured prompts, a multiple of the run's ppo_mini_batch_size; as many held-out ones, and
                            those of the updates once more
  bins=6                    length bins of nearly equal mass
  folds=8                   groups of prompts, left out one at a time for the standard errors
  target_clip_rate=0.15     share of the measured sequences that the matched clips leave outside the band, or (active)
                            of those with A != 0 whose gradient they remove

Any other KEY=VALUE changes a value of RUN/config.yaml, and run.dir=FOLDER the place for the results. Each rank
keeps 4 bytes * parameters / ranks * (N + folds) in its host's memory, N the lesser of the measured sequences and of
folds * bins * (weights + 3 * algorithms), with two kinds of weight for fspo, rloo and gspo: choose them accordingly.
"""
_DEFAULTS: Final[dict[str, Any]] = {
    "algos": ["fspo", "rloo", "gspo"],
    "rounds": 1,
    "updates": 2,
    "prompts": 64,
    "bins": 6,
    "folds": 8,
    "target_clip_rate": 0.15,
}


def own_settings(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The command's own settings, and the overrides of the run's configuration.

    Raises:
        BadInput: for a wrong value, naming the key.
    """
    changed, overrides = split_arguments(arguments, _DEFAULTS)
    own = _DEFAULTS | changed
    for key, least in (("rounds", 1), ("updates", 1), ("prompts", 2), ("bins", 1), ("folds", 2)):
        if type(own[key]) is not int or own[key] < least:
            raise BadInput(f"{key}={own[key]!r} must be a whole number from {least}")
    if own["folds"] > own["prompts"]:
        raise BadInput(f"folds={own['folds']} exceeds prompts={own['prompts']}: a fold holds at least one prompt")
    check_share(own, "target_clip_rate")
    own["settings"] = {}
    for algo in as_list(own, "algos", choices("algo")):
        loss = OmegaConf.load(CONF_DIR / "algo" / f"{algo}.yaml").actor_rollout_ref.actor.policy_loss
        settings = resolve_settings(OmegaConf.to_container(loss))  # with the default clips
        if settings is None or settings.needs_state:
            raise BadInput(f"algos: {algo} has no fixed band on S; try fspo, rloo, gspo or luspo")
        own["settings"][algo] = dataclasses.asdict(settings)
    return own, overrides


def configure(arguments: Sequence[str]) -> Any:
    """The run's own configuration with the overrides, turned into a measurement of its checkpoint.

    Raises:
        BadInput: for a wrong value, a damaged configuration or checkpoint, or sizes that do not fit.
    """
    if not arguments or "=" in arguments[0]:
        raise BadInput("the first argument must be a run folder or a global_step_N folder; see --help")
    own, overrides = own_settings(arguments[1:])
    try:
        checkpoint = actor_folder(Path(arguments[0])).parent.absolute()
    except OSError as error:
        raise BadInput(str(error)) from None
    run = checkpoint.parent.parent
    path = run / CONFIG_FILE
    try:
        kept, _ = TRAINING.earlier_names.current(OmegaConf.to_container(OmegaConf.load(path)))
        config = OmegaConf.create(moved(kept, kept["run"]["dir"], str(run)))
        init = config.ray_kwargs.ray_init
        if init.address not in (None, "local"):
            # The cluster that the run's last start had joined may be gone.
            init.address = None
            init.num_gpus = None  # as conf/base.yaml has it; a joined cluster takes none
        OmegaConf.select(init, "runtime_env.env_vars", default={}).pop(RUN_ID_VARIABLE, None)
        config.run.dir = str(run / FOLDER)
        config.merge_with_dotlist([override.lstrip("+") for override in overrides])
    except (yaml.YAMLError, OmegaConfBaseException, OSError, KeyError) as error:
        raise BadInput(f"{path} is not the configuration of a run ({type(error).__name__}): restore it") from None
    actor = config.actor_rollout_ref.actor
    contents, mini = list(actor.checkpoint.load_contents), int(actor.ppo_mini_batch_size)
    ranks = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    if own["prompts"] % mini:
        raise BadInput(
            f"prompts={own['prompts']} is not a multiple of the run's actor_rollout_ref.actor.ppo_mini_batch_size="
            f"{mini}: set it to {-(-own['prompts'] // mini) * mini}"
        )
    if damage := checkpoint_damage(checkpoint, ranks, contents):
        raise BadInput(f"the checkpoint cannot be measured: {damage[0]}; name another global_step_N folder")
    measured = {
        "alignment": {"checkpoint": str(checkpoint), **{key: own[key] for key in own if key != "algos"}},
        "data.train_batch_size": own["updates"] * mini + own["prompts"],
        "data.gen_batch_size": None,
        "evaluate": False,
        "fspo.match_scale": "native",  # the run's config.yaml holds the multiplier that "matched" stands for
        "fspo.record_sequences": False,
        "trainer.v1.trainer_mode": "alignment",
        "trainer.default_local_dir": "${run.dir}/checkpoints",
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(checkpoint),
        "trainer.del_local_ckpt_after_load": False,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    }
    for key, value in measured.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def _problems(config: DictConfig) -> Iterator[str]:
    """Those of a training run with its trainer."""
    as_trained = config.copy()
    OmegaConf.update(as_trained, "trainer.v1.trainer_mode", "fspo")
    yield from TRAINING.problems(as_trained)


def _conclude(config: DictConfig) -> None:
    from benchmarks.alignment.report import read_rounds, write_report

    folder = Path(config.run.dir)
    print(write_report(folder, config, read_rounds(folder, config.alignment.rounds)), flush=True)


JOB: Final = Job(
    command="benchmarks.alignment",
    config=TRAINING.config,
    modules=("benchmarks.alignment.trainer", "benchmarks.alignment.worker"),
    problems=_problems,
    facts=TRAINING.facts,
    conclude=_conclude,
    resumes=False,
)


def main() -> None:
    """Command line."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # this process only; workers log to their files as they do
    # benchmarks/ is not installed: Ray's workers find it here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        config = configure(arguments)
        export_platform(config)
    except (BadInput, WrongMachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    watch_for_warning()
    launch_or_exit(config, JOB)


if __name__ == "__main__":
    main()
