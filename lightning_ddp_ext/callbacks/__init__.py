"""Callbacks that show what the strategies do."""

from lightning_ddp_ext.callbacks.balance_report import BalanceReport

__all__ = ["BalanceReport"]
