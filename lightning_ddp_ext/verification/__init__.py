"""Proofs that a module trains on several devices as on one, or the line that is the reason why not."""

from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.verification.verifier import Check, Report, verify

__all__ = ["Check", "ImpossibleError", "Report", "verify"]
