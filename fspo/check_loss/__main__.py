"""``python -m fspo.check_loss MODULE:FUNCTION ...``: is a policy loss right, and what does it do by response length?

verl is not needed. Exit status: 0 if every check passed and, with ``--like NAME``, the gradient equals that of NAME
(:mod:`fspo.check_loss.like`); 1 if not; 2 if something could not be checked or compared. The last line says which.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import torch

from fspo.check_loss import LossError, PolicyLoss, Report, check, load
from fspo.check_loss.checks import checks
from fspo.check_loss.like import compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("python -m fspo.check_loss", description="Check a policy loss, by length too.")
    what = "with the signature of verl's registry, or of old_log_prob, log_prob, advantages, response_mask alone"
    parser.add_argument("losses", nargs="+", metavar="MODULE:FUNCTION", help=what)
    what = "a setting of the actor; policy_loss._target_=CLASS: the defaults of that class"
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help=what)
    what = "dataclass of the settings, for a loss that asks for one: verl's is verl.workers.config:ActorConfig"
    parser.add_argument("--actor", metavar="MODULE:CLASS", help=what)
    what = "verl's averaging, for a loss that reads it (default: token-mean, or that of --like)"
    parser.add_argument("--loss-agg-mode", metavar="MODE", help=what)
    what = "the loss is a mean over the rows of a micro-batch, and the caller averages over these, as TRL does"
    parser.add_argument("--average", choices=["caller"], help=what)
    what = "compare with one of ours (fspo, gspo, rloo, luspo, ...) or MODULE:FUNCTION; both get its settings"
    parser.add_argument("--like", metavar="NAME", help=what)
    parser.add_argument("--full", action="store_true", help="all checks, and what the loss does by length")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small tensors
    return max(_report(name, options) for name in options.losses)


def _report(name: str, options: argparse.Namespace) -> int:
    """Print what is to be said of one loss; its exit status."""
    mode: str | None = options.loss_agg_mode
    lines: list[str] = []
    equal = True
    try:
        loss = load(name, options.config, mode, options.actor)
        if options.like:
            # A name of ours has an averaging of its own, which is part of what it stands for.
            like = load(options.like, options.config, mode if ":" in options.like else None, options.actor)
            if ":" in name:
                loss = PolicyLoss(loss.function, like.config, mode or like.loss_agg_mode)
        loss.caller_averages = options.average == "caller"
        if options.like:
            equal, verdict, differences = compare(loss, like)
            lines = [f"like {options.like}: {verdict}", *(f"  {line}" for line in differences)]
            if loss.takes_mode and loss.loss_agg_mode != like.loss_agg_mode:
                lines.append(f"  loss_agg_mode: {loss.loss_agg_mode} in place of {like.loss_agg_mode}")
            lines.append("")
        report = check(loss) if options.full else Report(checks(loss))
    except LossError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    lines += report.lines(False) + (report.measured() if options.full else [])
    verdict = f"{report.verdict()} (is it the loss that it is called? --like NAME compares)"
    if options.like:
        says = report.verdict() if equal else report.verdict().removeprefix("conforms: ")
        verdict = f"{'equal' if equal else 'not equal'} to {options.like}; {says}"
    averages = f", loss_agg_mode={loss.loss_agg_mode}" if loss.takes_mode else ""
    print(f"{name}{averages}\n", *lines, verdict, "", sep="\n", flush=True)
    return int(not (report.conforms and equal))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as other programs do where the reader has gone, as head does
    sys.exit(main())
