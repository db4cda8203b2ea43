# What type checkers see; when the program runs, these are the package's callbacks, loaded a second time.
import pytorch_lightning

from lightning_ddp_ext import callbacks as ours
from lightning_ddp_ext.callbacks import read_predictions as read_predictions

class BalanceReport(ours.BalanceReport, pytorch_lightning.Callback): ...  # type: ignore
class GradientCheck(ours.GradientCheck, pytorch_lightning.Callback): ...  # type: ignore
class JoinReport(ours.JoinReport, pytorch_lightning.Callback): ...  # type: ignore
class PredictionWriter(ours.PredictionWriter, pytorch_lightning.Callback): ...  # type: ignore
class ReplicaConsistency(ours.ReplicaConsistency, pytorch_lightning.Callback): ...  # type: ignore
