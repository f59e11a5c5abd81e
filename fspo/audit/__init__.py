"""The length audit: a table of the responses of every mini-batch of a run, for any sequence loss in anyone's trainer.

Each rank that sees sequences of its own writes files of its own (:mod:`fspo.table`), so no collective is needed::

    from fspo.audit import Audit
    from fspo.losses import ALGORITHMS

    audit = Audit("audit", ALGORITHMS["seq_gspo"])
    audit.add(log_prob, old_log_prob, mask, advantages)  # every micro-batch of the update
    audit.end_mini_batch(step)                            # after the optimizer step

``python -m fspo.audit FOLDER`` prints what they say.
"""

from fspo.audit.read import AuditRecords, read_audit
from fspo.audit.recording import Audit, from_packed, minibatch_numbers
from fspo.audit.show import describe

__all__ = [
    "Audit",
    "AuditRecords",
    "describe",
    "from_packed",
    "minibatch_numbers",
    "read_audit",
]
