"""Entry point: ``python -m recipe.fspo.main [algo=...] [experiment=...] [any Hydra override]``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
from omegaconf import DictConfig

from recipe.runner.faults.preemption import PREEMPTED, end_on_signals, watch_for_warning
from recipe.runner.faults.processes import own_run_id
from recipe.runner.launch.commands import BAD_INPUT, INTERRUPTED, launch_or_exit
from recipe.runner.launch.compose import (
    CONF_DIR,
    ROOT_CONFIG,
    choices,
    compose,
    first_of_each_sweep,
    for_hydra,
    without_flags,
)
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import WrongMachineError, export_platform, forked_workers
from recipe.runner.launch.restarts import supervise
from recipe.runner.launch.run_folder import is_restart
from recipe.runner.launch.run_settings import with_settings_of_run
from recipe.runner.launch.values import PreflightError

#: Hydra's flags that print something in place of a run.
_PRINTS = {"--cfg", "-c", "--info", "-i", "--hydra-help"}


def _problems(config: DictConfig) -> Iterator[str]:
    from recipe.fspo.config import problems  # imports verl: after the platform is exported

    return problems(config)


def _complete(config: DictConfig) -> None:
    from recipe.fspo.config import complete_loss, complete_mode

    complete_mode(config)
    complete_loss(config)


def _conclude(config: DictConfig) -> None:
    folder = Path(config.fspo.run_dir)
    if config.evaluate:
        from fspo.evaluation import conclude_evaluation

        print(conclude_evaluation(folder, config.seed), flush=True)
    else:
        from fspo.report.summary import summarise

        print(summarise(folder), flush=True)


JOB = Job(("recipe.fspo.trainer", "recipe.fspo.worker"), _problems, _complete, _conclude)


@hydra.main(config_path=str(CONF_DIR), config_name=ROOT_CONFIG, version_base=None)
def _train(config: DictConfig) -> None:
    launch_or_exit(config, JOB)


def usage() -> str:
    """What ``--help`` prints."""
    return f"""\
usage: python -m recipe.fspo.main [KEY=VALUE ...]

Trains a policy with verl, Ray, FSDP and vLLM. Keys to swap:

  algo=fspo             loss, clip values and native advantage: {", ".join(choices("algo"))}
  experiment=demo       model, data, machine: {", ".join(choices("experiment"))}
  mode=sync             when responses are generated: {", ".join(choices("mode"))}
  seed=1                of data order, sampling and initialisation
  advantage=native      or shared: one advantage estimator for every algorithm
  match_scale=native    or matched: losses that sum over tokens are divided by fspo.reference_length
  evaluate=false        true: no training; avg@k and pass@k of the validation sets, with intervals

Settings often changed, of the recipe and of verl:

  fspo.run_dir=FOLDER   metrics, checkpoints, figure; give the same one again to resume, with the settings that it keeps
  resume=FOLDER         the same for a folder that must be there
  fspo.allow_changed=[KEY]                                  settings that a resumed run may change; recorded in run.json
  actor_rollout_ref.actor.policy_loss.clip_low=0.03         band below; clip_high above; units in docs/algorithms.md
  actor_rollout_ref.actor.optim.lr=1e-6                     learning rate
  actor_rollout_ref.model.path=FOLDER                       model in Hugging Face format
  data.train_files=FILE data.val_files=[FILE,FILE]          made by python -m fspo.data; yours: docs/data-and-rewards.md
  reward.custom_reward_function.path=FILE                   a reward of your own
  data.train_batch_size=512                                 prompts per step
  actor_rollout_ref.actor.ppo_mini_batch_size=32            prompts per optimizer step
  actor_rollout_ref.rollout.n=16                            responses per prompt
  trainer.nnodes=1 trainer.n_gpus_per_node=8                machine
  trainer.total_training_steps=300 trainer.save_freq=5 trainer.test_freq=10
  trainer.logger=[console,tensorboard,wandb]                verl's, into the run folder; fspo.log=all: every metric
  hydra.searchpath=[FOLDER]                                 your algo/ (own loss: docs/extending.md) or experiment/

Any other key of verl's configuration works too (+KEY=VALUE adds one that is not there). --cfg job prints the resolved
configuration, --multirun sweeps (algo=fspo,gspo seed=1,2), --hydra-help has Hydra's own flags.
Exit status: 0 finished, 1 failed, {BAD_INPUT} bad input, {PREEMPTED} preempted and saved, {INTERRUPTED} interrupted,
143 or 129 ended by SIGTERM or a closed terminal.

See also, each with --help: python -m recipe.fspo.compare (algorithms x seeds), recipe.runner.plan (memory and time
before a run), recipe.runner.rehearse (a GPU job made small, on CPUs), recipe.runner.export, fspo.report, fspo.data.
"""


def main() -> None:
    """Decide the platform, then hand over to Hydra."""
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(usage(), end="")
        return
    from hydra.errors import HydraException

    several = {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(sys.argv[1:])
    try:
        if not several:
            given = len(sys.argv) - 1
            sys.argv[1:] = with_settings_of_run(sys.argv[1:])
            if kept := sys.argv[1 : len(sys.argv) - given]:
                print(f"note: the run folder keeps {' '.join(kept)}", file=sys.stderr)
        sys.argv[1:] = for_hydra(sys.argv[1:])
    except PreflightError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)
    except HydraException as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    if any(argument.partition("=")[0] in _PRINTS for argument in sys.argv[1:]):
        _train()  # needs no machine that could run it
        return
    watch_for_warning()
    end_on_signals()
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # this process only; workers log to their files as they do
    try:
        config = compose(first_of_each_sweep(without_flags(sys.argv[1:])), own=("resume",))
        export_platform(config)
    except (HydraException, ModuleNotFoundError, WrongMachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    if (
        type(config.fspo.restarts) is int
        and config.fspo.restarts > 0
        and not config.evaluate
        and not several
        and not is_restart()
    ):
        sys.exit(supervise(sys.argv[1:], Path(config.fspo.run_dir).absolute(), config.fspo.restarts))
    own_run_id()  # before anything is started: whatever is, inherits it
    # Of several runs each begins it for itself. Beside this process's own imports.
    with contextlib.nullcontext() if several else forked_workers(config, JOB.modules):
        _train()


if __name__ == "__main__":
    main()
