"""Callbacks that show what the strategies do."""

from lightning_ddp_ext.callbacks.balance_report import BalanceReport
from lightning_ddp_ext.callbacks.gradient_check import GradientCheck
from lightning_ddp_ext.callbacks.join_report import JoinReport
from lightning_ddp_ext.callbacks.prediction_writer import PredictionWriter, read_predictions
from lightning_ddp_ext.callbacks.replica_consistency import ReplicaConsistency

__all__ = ["BalanceReport", "GradientCheck", "JoinReport", "PredictionWriter", "ReplicaConsistency", "read_predictions"]
