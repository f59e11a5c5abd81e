"""Checks anyone's policy loss: ``python -m fspo.check_loss MODULE:FUNCTION`` (docs/check-loss.md)."""

from fspo.check_loss.command import Report, check, configured, load

__all__ = ["Report", "check", "configured", "load"]
