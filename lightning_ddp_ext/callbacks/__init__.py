"""Callbacks that show what the strategies do."""

from lightning_ddp_ext.callbacks.gradient_check import GradientCheck
from lightning_ddp_ext.callbacks.prediction_writer import PredictionWriter, read_predictions
from lightning_ddp_ext.callbacks.replica_consistency import ReplicaConsistency
from lightning_ddp_ext.callbacks.reports import BalanceReport, JoinReport

__all__ = ["BalanceReport", "GradientCheck", "JoinReport", "PredictionWriter", "ReplicaConsistency", "read_predictions"]
