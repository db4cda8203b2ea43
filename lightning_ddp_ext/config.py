"""Schemas of the packaged Hydra groups."""

from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
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

    _target_: str = "lightning_ddp_ext.demo.digits.SlowedDigitsCNN"
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

    _target_: str = "lightning_ddp_ext.demo.byte_text.StdlibStream"
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


# ruff: noqa: UP045  OmegaConf reads `Optional[...]` on every Python version, `... | None` not on all.


@dataclass(kw_only=True)
class BalancedDataParallelConfig:
    """Arguments of `BalancedDataParallelStrategy`."""

    _target_: str = "lightning_ddp_ext.BalancedDataParallelStrategy"
    gpu0_batch_size: Optional[int] = None
    split: Optional[list[float]] = None
    balance: Optional[str] = None
    weight_by: Any = "samples"
    batch_dim: int = 0


@dataclass(kw_only=True)
class ExplicitDDPConfig:
    """Arguments of `ExplicitDDPStrategy`, the base of those below."""

    _target_: str = "lightning_ddp_ext.ExplicitDDPStrategy"
    process_group_backend: Optional[str] = None
    timeout: Any = None
    init_method: Optional[str] = None
    network_interface: Optional[str] = None
    start_method: str = "popen"
    bucket_cap_mb: float = 25.0
    weight_by: Any = "samples"
    batch_dim: int = 0
    activation_checkpointing: Any = None
    stall_timeout: Any = None


@dataclass(kw_only=True)
class DDPCheckpointConfig(ExplicitDDPConfig):
    """Arguments of `DDPCheckpointStrategy`."""

    _target_: str = "lightning_ddp_ext.DDPCheckpointStrategy"


@dataclass(kw_only=True)
class DDPJoinConfig(ExplicitDDPConfig):
    """Arguments of `DDPJoinStrategy`."""

    _target_: str = "lightning_ddp_ext.DDPJoinStrategy"
    uneven_inputs: str = "join"


@dataclass(kw_only=True)
class DDPConfig:
    """Arguments of Lightning's `DDPStrategy`, with the process group and the network interface."""

    _target_: str = "lightning_ddp_ext.strategies.builtin.ddp_strategy"
    process_group_backend: Optional[str] = None
    timeout: Any = 1800.0
    init_method: Optional[str] = None
    network_interface: Optional[str] = None
    start_method: str = "popen"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False


@dataclass(kw_only=True)
class FSDPConfig:
    """Arguments of Lightning's `FSDPStrategy`, with the process group and the network interface."""

    _target_: str = "lightning_ddp_ext.strategies.builtin.fsdp_strategy"
    process_group_backend: Optional[str] = None
    timeout: Any = 1800.0
    init_method: Optional[str] = None
    network_interface: Optional[str] = None
    sharding_strategy: str = "FULL_SHARD"
    cpu_offload: bool = False
    state_dict_type: str = "full"


@dataclass(kw_only=True)
class SingleDeviceConfig:
    """Lightning's choice for a single device."""

    _target_: str = "lightning_ddp_ext.strategies.builtin.single_device_strategy"


@dataclass(kw_only=True)
class ProcessGroupConfig:
    """How processes find each other.

    Attributes:
        backend: The backend; None for what suits the devices.
        timeout_seconds: How long ranks wait for each other, and the time limit of one collective.
        stall_timeout_seconds: How long `ddp_checkpoint` and `ddp_join` do without a sign of life; None for ever.
        init_method: `"tcp://host:port"` or `"file:///path"`; None for what the cluster says.
    """

    backend: Optional[str] = None
    timeout_seconds: float = 1800.0
    stall_timeout_seconds: Optional[float] = 60.0
    init_method: Optional[str] = None


@dataclass(kw_only=True)
class NetworkConfig:
    """The network interface: `"auto"`, `"loopback"` or a name."""

    interface: str = "auto"


@dataclass(kw_only=True)
class ClusterConfig:
    """Where the job runs."""

    num_nodes: int = 1


@dataclass(kw_only=True)
class ManualClusterConfig:
    """Arguments of `ManualEnvironment`."""

    _target_: str = "lightning_ddp_ext.ManualEnvironment"
    num_nodes: int = MISSING
    node_rank: int = MISSING
    main_address: str = MISSING
    main_port: int = 29500


@dataclass(kw_only=True)
class SlurmClusterConfig:
    """Arguments of `CheckedSLURMEnvironment`."""

    _target_: str = "lightning_ddp_ext.CheckedSLURMEnvironment"
    num_nodes: int = MISSING
    auto_requeue: bool = True
    requeue_signal: str = "SIGUSR1"


@dataclass(kw_only=True)
class TrainerConfig:
    """Arguments of `lightning.pytorch.Trainer` that no other group sets.

    `accelerator` and `devices` left empty choose the CUDA devices if there are any, and otherwise the CPU, with two
    replicas or processes if the strategy uses several devices.
    """

    _target_: str = "lightning.pytorch.Trainer"
    accelerator: Optional[str] = None
    devices: Any = None
    num_nodes: int = 1
    precision: Any = None
    fast_dev_run: Any = False
    max_epochs: Optional[int] = None
    min_epochs: Optional[int] = None
    max_steps: int = -1
    min_steps: Optional[int] = None
    max_time: Any = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    overfit_batches: Any = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: Optional[int] = 1
    num_sanity_val_steps: Optional[int] = None
    log_every_n_steps: Optional[int] = None
    enable_checkpointing: Optional[bool] = None
    enable_progress_bar: Optional[bool] = None
    enable_model_summary: Optional[bool] = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: Any = None
    gradient_clip_algorithm: Optional[str] = None
    deterministic: Any = None
    benchmark: Optional[bool] = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Any = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: Optional[str] = None
    enable_autolog_hparams: bool = True
    model_registry: Optional[str] = None


@dataclass(kw_only=True)
class TrainConfig:
    """The whole configuration of the command.

    Attributes:
        seed: Seed of Python, NumPy and torch, in every process.
        test: Whether to test after training.
        picture: Whether to draw the curves of the run.
        ckpt_path: A checkpoint to resume from.
        weights_only: Whether to refuse checkpoints that hold more than tensors and plain values, since loading those
            runs code.
        reference: Whether to train once more in one process, on the same batches, and print both results. None does so
            where `data.train_fractions` is set.
    """

    seed: int = 1
    test: bool = True
    picture: bool = True
    ckpt_path: Optional[str] = None
    weights_only: bool = True
    reference: Optional[bool] = None
    strategy: Any = MISSING
    process_group: Any = None
    network: Any = None
    cluster: Any = MISSING
    trainer: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    callbacks: Any = field(default_factory=dict)
    logger: Any = field(default_factory=dict)


def register_schemas() -> None:
    """Put the schemas where the packaged files look for them, in groups below `lightning_ddp_ext`."""
    schemas: dict[str, dict[str, type]] = {
        "lightning_ddp_ext": {"train": TrainConfig},
        "lightning_ddp_ext/strategy": {
            "balanced_dp": BalancedDataParallelConfig,
            "ddp": DDPConfig,
            "ddp_checkpoint": DDPCheckpointConfig,
            "ddp_join": DDPJoinConfig,
            "fsdp": FSDPConfig,
            "single": SingleDeviceConfig,
        },
        "lightning_ddp_ext/process_group": {"process_group": ProcessGroupConfig},
        "lightning_ddp_ext/network": {"network": NetworkConfig},
        "lightning_ddp_ext/cluster": {
            "cluster": ClusterConfig,
            "manual": ManualClusterConfig,
            "slurm": SlurmClusterConfig,
        },
        "lightning_ddp_ext/trainer": {"trainer": TrainerConfig},
        **PARTS,
    }
    store = ConfigStore.instance()
    for group, nodes in schemas.items():
        for name, node in nodes.items():
            store.store(group=group, name=name, node=node, provider="lightning_ddp_ext")


register_schemas()
