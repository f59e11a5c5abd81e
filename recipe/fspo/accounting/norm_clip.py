"""A warning where verl's clip of the gradient norm binds in every step."""

from __future__ import annotations

from typing import Final


class NormClipWatch:
    """Says once that the clip of the gradient norm binds all the time. Defined here.

    A sum over tokens, as FSPO's, has a gradient about L times that of a mean, as GSPO's. Where ``optim.clip_grad``
    binds in every step, all steps are equally long whatever their gradients, and the loss's scale has no effect.

    Args:
        clip: ``actor.optim.clip_grad`` (``actor.grad_clip`` is read by nothing in verl 0.9.1).
    """

    STEPS: Final = 10

    def __init__(self, clip: float) -> None:
        self.clip, self._bound = clip, 0

    def warning(self, norm: float) -> str | None:
        """A sentence after the tenth step in a row whose gradients were longer than the clip; None otherwise.

        Args:
            norm: Of the step's gradients before clipping: the smallest, or, where only that is known, the mean.
        """
        self._bound = self._bound + 1 if norm > self.clip else 0
        if self._bound != self.STEPS:
            return None
        return (
            f"warning: the gradients of the last {self.STEPS} steps were longer than actor.optim.clip_grad="
            f"{self.clip:g} (norm now {norm:.3g}): all steps are equally long, whatever their gradients. Divide the "
            "loss by a typical length (policy_loss.grad_multiplier; in this recipe fspo.match_scale=matched), or raise "
            "clip_grad"
        )
