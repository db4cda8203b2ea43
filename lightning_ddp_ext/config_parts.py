"""Dataclass schemas behind the packaged models, data, callbacks and loggers, as `config.py` has for the other groups.

They have the keys of the packaged files. Other arguments of the same classes are added with `+group.key=value`.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

# ruff: noqa: UP045  OmegaConf reads `Optional[...]` on every Python version, `... | None` not on all.


@dataclass(kw_only=True)
class DigitsCNNConfig:
    """Arguments of `DigitsCNN`."""

    _target_: str = "lightning_ddp_ext.demo.digits.DigitsCNN"
    width: int = 32
    learning_rate: float = 0.002


@dataclass(kw_only=True)
class SlowedDigitsCNNConfig(DigitsCNNConfig):
    """Arguments of `SlowedDigitsCNN`; plain lists, as checkpoints hold them."""

    _target_: str = "lightning_ddp_ext.demo.slowed_digits.SlowedDigitsCNN"
    _convert_: str = "all"
    milliseconds_per_sample: list[float] = MISSING


@dataclass(kw_only=True)
class ByteTransformerConfig:
    """Arguments of `ByteTransformer`."""

    _target_: str = "lightning_ddp_ext.demo.byte_text.ByteTransformer"
    width: int = 128
    depth: int = 4
    heads: int = 4
    block_size: int = 1024
    learning_rate: float = 0.002


@dataclass(kw_only=True)
class DigitsDataConfig:
    """Arguments of `DigitsData`."""

    _target_: str = "lightning_ddp_ext.demo.digits.DigitsData"
    batch_size: int = 32
    seed: int = 1
    train_fractions: Optional[list[float]] = None


@dataclass(kw_only=True)
class StdlibStreamConfig:
    """Arguments of `StdlibStream`."""

    _target_: str = "lightning_ddp_ext.demo.byte_stream.StdlibStream"
    batch_size: int = 8
    block_size: int = 128
    files: int = 10
    seed: int = 1


@dataclass(kw_only=True)
class StdlibTextConfig:
    """Arguments of `StdlibText`."""

    _target_: str = "lightning_ddp_ext.demo.byte_text.StdlibText"
    batch_size: int = 16
    block_size: int = 128
    max_bytes: int = 2_000_000
    seed: int = 1


@dataclass(kw_only=True)
class ModelCheckpointConfig:
    """Arguments of Lightning's `ModelCheckpoint`."""

    _target_: str = "lightning.pytorch.callbacks.ModelCheckpoint"
    dirpath: Optional[str] = None
    filename: Optional[str] = None
    enable_version_counter: bool = True
    save_on_train_epoch_end: Optional[bool] = None


@dataclass(kw_only=True)
class BalanceReportConfig:
    """Arguments of `BalanceReport`."""

    _target_: str = "lightning_ddp_ext.callbacks.BalanceReport"
    path: Optional[str] = None


@dataclass(kw_only=True)
class JoinReportConfig:
    """Arguments of `JoinReport`."""

    _target_: str = "lightning_ddp_ext.callbacks.JoinReport"
    log: bool = False
    path: Optional[str] = None


@dataclass(kw_only=True)
class ReplicaConsistencyConfig:
    """Arguments of `ReplicaConsistency`."""

    _target_: str = "lightning_ddp_ext.callbacks.ReplicaConsistency"
    every_n_steps: int = 100
    on_difference: str = "raise"
    buffers: Optional[bool] = None
    ignore: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class GradientCheckConfig:
    """Arguments of `GradientCheck`."""

    _target_: str = "lightning_ddp_ext.callbacks.GradientCheck"
    batches: int = 1


@dataclass(kw_only=True)
class CSVLoggerConfig:
    """Arguments of Lightning's `CSVLogger`."""

    _target_: str = "lightning.pytorch.loggers.CSVLogger"
    save_dir: str = MISSING
    name: Optional[str] = None
    version: Any = None


PARTS: dict[str, dict[str, type]] = {
    "lightning_ddp_ext/model": {
        "byte_transformer": ByteTransformerConfig,
        "digits_cnn": DigitsCNNConfig,
        "slowed_digits_cnn": SlowedDigitsCNNConfig,
    },
    "lightning_ddp_ext/data": {
        "digits": DigitsDataConfig,
        "stdlib_stream": StdlibStreamConfig,
        "stdlib_text": StdlibTextConfig,
    },
    "lightning_ddp_ext/callbacks": {
        "balance_report": BalanceReportConfig,
        "checkpoint": ModelCheckpointConfig,
        "gradient_check": GradientCheckConfig,
        "join_report": JoinReportConfig,
        "replica_consistency": ReplicaConsistencyConfig,
    },
    "lightning_ddp_ext/logger": {"csv": CSVLoggerConfig},
}
