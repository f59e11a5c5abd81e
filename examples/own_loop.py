"""A loss of this package in your own loop, with the audit beside it. Needs torch, numpy, scipy, pyarrow, not verl.

    python examples/own_loop.py

Random numbers stand where your rollouts and your model's log-probabilities go.
"""

import dataclasses

import torch

from fspo.audit import Audit, describe, read_audit
from fspo.losses import ALGORITHMS, sequence_policy_loss

rule = ALGORITHMS["seq_gspo"]
audit = Audit("audit", rule, loss="gspo")  # without a rule, S, L and A alone
for step in range(24):
    for mini_batch in range(2):
        old_log_prob = -torch.rand(256, 100)
        log_prob = (old_log_prob + 0.01 * mini_batch * torch.randn(256, 100)).requires_grad_()
        mask, advantages = torch.arange(100) < torch.randint(1, 101, (256, 1)), torch.randn(256, 1).expand(256, 100)
        sequence_policy_loss(log_prob, old_log_prob, advantages, mask, rule).loss_B.mean().backward()
        audit.add(log_prob, old_log_prob, mask, advantages)  # every micro-batch
        audit.end_mini_batch(step)  # after the optimizer step
print(describe(read_audit("audit")))
# For the next run, the band and the c that it names.
rule = dataclasses.replace(ALGORITHMS["fspo"], c_low=0.0143, c_high=0.0143)
