"""Entry point: ``python -m recipe.fspo.main [algo=...] [experiment=...] [any Hydra override]``."""

from __future__ import annotations

import sys

from recipe.runner.faults.preemption import ENDING, INTERRUPTED, PREEMPTED, take_signals


def usage() -> str:
    """What ``--help`` prints."""
    from recipe.fspo.job import choices
    from recipe.runner import main as runner
    from recipe.runner.launch.commands import BAD_INPUT

    return f"""\
usage: python -m recipe.fspo.main [KEY=VALUE ...]

Trains a policy with verl, Ray, FSDP and vLLM. Keys to swap:

  algo=fspo             loss, clip values and native advantage: {", ".join(choices("algo"))}
  experiment=demo       model, data, machine: {", ".join(choices("experiment"))}
                        ~experiment: none; your main_ppo arguments go beside it (docs/verl.md#your-script)
  mode=sync             when responses are generated: {", ".join(choices("mode"))}
  seed=1                of data order, sampling and initialisation
  evaluate=false        true: no training; avg@k and pass@k of the validation sets, with intervals

Settings often changed, of the recipe and of verl:

  fspo.clip_values=measured                                 on a run's first responses; published: the loss's own
  fspo.match_scale=matched                                  losses that sum over tokens are divided by a typical length
  run.dir=FOLDER        metrics, checkpoints, figure; give the same one again to resume, with the settings that it keeps
  resume=FOLDER         {runner.SETTINGS["resume"][1]}
  dry_run=false         {runner.SETTINGS["dry_run"][1]}
  run.allow_changed=[KEY]                                  settings that a resumed run may change; recorded in run.json
  actor_rollout_ref.actor.policy_loss.exponent=0.43         how the band grows with the length (0, 0.5, 1 have names)
  actor_rollout_ref.actor.policy_loss.c_low=0.05            band below, in nats; c_high above; given ones: not measured
  actor_rollout_ref.actor.optim.lr=1e-6                     learning rate
  actor_rollout_ref.model.path=FOLDER                       model in Hugging Face format
  data.train_files=FILE data.val_files=[FILE,FILE]          yours: docs/data.md
  reward.custom_reward_function.path=FILE                   a reward of your own
  data.train_batch_size=512                                 prompts per step
  actor_rollout_ref.actor.ppo_mini_batch_size=32            prompts per optimizer step
  actor_rollout_ref.rollout.n=16                            responses per prompt
  trainer.nnodes=1 trainer.n_gpus_per_node=8                machine
  trainer.total_training_steps=300 trainer.save_freq=5 trainer.test_freq=10
  trainer.logger=[console,tensorboard,wandb]                verl's, into the run folder
  hydra.searchpath=[FOLDER]                                 your algo/ (own loss: docs/architecture.md) or experiment/

Any other key of verl's configuration works too (+KEY=VALUE adds one that is not there, ~KEY removes one).
--cfg job prints the configuration as it is composed (--resolve, --package GROUP).
A first Ctrl-C, TERM, HUP, USR1, USR2 or XCPU saves after the step in progress and ends the run; a second, at once.
Exit status: 0 finished, 1 failed, {BAD_INPUT} bad input, {PREEMPTED} worth another start (it was asked to end, or a
process died or hung after a finished step), {INTERRUPTED} the same by Ctrl-C, 128+N by a second signal N.

See also, each with --help: python -m recipe.fspo.compare (algorithms x seeds), recipe.runner.export,
fspo.report, recipe.math.data (published sets), recipe.math.evaluation.
"""


def main() -> None:
    """Hand the command line to the runner; what takes time to import is imported here, where Ctrl-C has a sentence."""
    from recipe.fspo.job import JOB
    from recipe.runner import main as runner

    runner.main(JOB, usage, "python -m recipe.fspo.compare algos=[fspo,gspo] seeds=[1,2]", sys.argv[1:])


if __name__ == "__main__":
    take_signals(ENDING.take)
    main()
