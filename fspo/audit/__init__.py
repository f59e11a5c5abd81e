"""The length audit: exact sums by length of every mini-batch of a run, for any sequence loss in anyone's trainer.

Each rank that sees sequences of its own writes one file of JSON lines, so no collective is needed::

    audit = Audit("audit", ALGORITHMS["seq_gspo"])
    audit.add(log_prob, old_log_prob, mask, advantages)   # every micro-batch of the update
    audit.end_mini_batch(step)                             # after the optimizer step

``python -m fspo.audit FOLDER`` prints what they add up to. The first line of a file says whose it is; every other line
is one mini-batch in the form of :func:`fspo.records.to_record`.
"""

from fspo.audit.description import LengthBins, describe, live_metrics
from fspo.audit.reading import AuditRecords, GrowingAudit, read_audit, read_responses
from fspo.audit.recording import Audit, MiniBatchSums, from_packed, minibatch_numbers

__all__ = [
    "Audit",
    "AuditRecords",
    "GrowingAudit",
    "LengthBins",
    "MiniBatchSums",
    "describe",
    "from_packed",
    "live_metrics",
    "minibatch_numbers",
    "read_audit",
    "read_responses",
]
