"""``python -m fspo.audit FOLDER``: what the clip does by length, and what follows."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fspo.audit.expected import USAGE, expected
from fspo.audit.read import read_audit
from fspo.audit.show import describe
from fspo.clip_value import ACCEPT
from fspo.responses import VIEWS
from fspo.types import NO_CLIP, SequenceLossSettings


def band_of(word: str) -> SequenceLossSettings:
    """The band of ``EXPONENT,LOW,HIGH``: -LOW <= S / L**EXPONENT <= HIGH, in nats per token**exponent.

    Raises:
        argparse.ArgumentTypeError: If the word is no such band, or LOW or HIGH is 0.
    """
    try:
        exponent, low, high = (float(part) for part in word.split(","))
        band = SequenceLossSettings(exponent=exponent, c_low=min(low, NO_CLIP), c_high=min(high, NO_CLIP))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word}: give EXPONENT,LOW,HIGH, such as 1,0.01,0.01 ({error})") from None
    if min(band.c_low, band.c_high) <= 0:
        raise argparse.ArgumentTypeError(f"{word}: LOW and HIGH must be above 0; inf is no limit")
    return band


def _expected(words: Sequence[str]) -> int:
    """``python -m fspo.audit expected``; status 2 for a wrong call."""
    try:
        print(USAGE if words in (["--help"], ["-h"]) else expected(words))
    except ValueError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fspo.audit FOLDER``; status 1 if something is missing, 2 if there is no audit to read."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["expected"]:
        return _expected(words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m fspo.audit",
        description=(__doc__ or "").partition(": ")[2],
        epilog=f"without any record:\n{USAGE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("folder", type=Path, help="what FSPO_AUDIT named, a run folder, or a parquet file of S and L")
    option("--run", default="", help="one of several starts in the folder; the newest by default")
    option("--accept", type=float, help=f"share that is to be accepted (default: the run's own, or {ACCEPT})")
    band = "one column more: -LOW <= S / L^EXPONENT <= HIGH in nats (inf: no limit); may be repeated"
    option("--band", type=band_of, action="append", default=[], metavar="EXPONENT,LOW,HIGH", help=band)
    option("--view", choices=[*VIEWS], default="outside", help="what counts: S outside a band, or a removed gradient")
    every = "count mini-batches before which no weight had moved, too: the old log-probabilities are the engine's"
    option("--every-mini-batch", action="store_true", help=f"{every}; for records that do not say so themselves")
    chosen = parser.parse_args(words)
    if chosen.accept is not None and not 0 < chosen.accept < 1:
        parser.error(f"--accept {chosen.accept:g}: must lie between 0 and 1, such as 0.85")
    records = read_audit(chosen.folder, chosen.run, chosen.every_mini_batch)
    if records.others:
        others = f"--run reads another one: {', '.join(records.others)}"
        remedy = "processes of one training are one run by Audit(run=, rank=, ranks=)"
        print(f"note: run {records.run}; {others}; {remedy}", file=sys.stderr)
    readable = len(records.responses) or records.left_out
    for problem in records.problems:
        print(f"{'warning' if readable else 'error'}: {problem}", file=sys.stderr)
    if not readable:
        return 2
    print(describe(records, chosen.accept, chosen.band, chosen.view))
    return 1 if records.problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends as other programs do where the reader has gone, as head does
    sys.exit(main())
