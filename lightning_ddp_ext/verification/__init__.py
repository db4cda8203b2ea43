"""Proofs that a module trains on several devices as on one, or the line that is the reason why not."""

from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.verification.report import Check, Report
from lightning_ddp_ext.verification.verifier import verify

__all__ = ["Check", "ImpossibleError", "Report", "verify"]
