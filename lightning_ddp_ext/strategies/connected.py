"""Lightning's DDP and FSDP over a chosen network, and the connection that all strategies of several processes share."""

from enum import Enum
from typing import Any

from typing_extensions import override

from lightning_ddp_ext._lightning import DDPStrategy, FSDPStrategy, ParallelStrategy
from lightning_ddp_ext._validation import check_choice
from lightning_ddp_ext.clusters.process_group_options import ConnectedMixin, device_type_of
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.resume.loading import WeightsOnlyLoadMixin


class ConnectedStrategy(ConnectedMixin, WeightsOnlyLoadMixin, ParallelStrategy):
    """Mixin that creates the process group by a `Connection` before Lightning, which keeps the group it finds."""

    def _connect(self) -> None:
        self._strategy.set_world_ranks()
        self._connection.open(self._strategy)

    @property
    def _strategy(self) -> DDPStrategy | FSDPStrategy:
        assert isinstance(self, DDPStrategy | FSDPStrategy)
        return self


class ConnectedDDPStrategy(ConnectedStrategy, DDPStrategy):
    """Lightning's `DDPStrategy` over a chosen network."""

    @override
    def setup_distributed(self) -> None:
        self._connect()
        super().setup_distributed()


class ConnectedFSDPStrategy(ConnectedStrategy, FSDPStrategy):
    """Lightning's `FSDPStrategy` over a chosen network."""

    def __init__(self, *, sharding_strategy: Any = "FULL_SHARD", state_dict_type: str = "full", **options: Any) -> None:
        if not isinstance(sharding_strategy, Enum):  # torch's enumeration is accepted too
            name = sharding_strategy.upper() if isinstance(sharding_strategy, str) else sharding_strategy
            from torch.distributed.fsdp import ShardingStrategy  # takes long, and few programs need it

            check_choice(
                "sharding_strategy", name, [*ShardingStrategy.__members__], "Leave it out to shard everything."
            )
        check_choice("state_dict_type", state_dict_type, ("full", "sharded"), 'Use "full" for one file.')
        super().__init__(sharding_strategy=sharding_strategy, state_dict_type=state_dict_type, **options)

    @override
    def _configure_launcher(self) -> None:
        if device_type_of(self) == "cpu":
            raise UnsupportedFeatureError("`fsdp` shards over accelerators, got the CPU. Use `strategy=ddp` there.")
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None  # as in Lightning's class
        self.accelerator.setup_device(self.root_device)
        self._connect()
        super().setup_environment()


def single_device_strategy() -> str:
    """Return the name by which the Trainer chooses its strategy for one device."""
    return "auto"
