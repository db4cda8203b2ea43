"""What a strategy is that uses several devices from one process: a world of one rank."""

from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.integration.checkpoints.checkpoint_loading import DataOnlyLoading
from lightning_ddp_ext.strategies.registered import Registered

T = TypeVar("T")


class SingleProcessStrategy(Registered, DataOnlyLoading, ParallelStrategy):
    """Several devices, one process: there is one rank, and nothing to communicate.

    Raises:
        UnsupportedFeatureError: By the Trainer's constructor, if it asks for several nodes or for synchronised batch
            normalisation, or if a launcher has started several processes.
    """

    @property
    def devices(self) -> list[torch.device]:
        """The Trainer's devices.

        Raises:
            RuntimeError: If the strategy has not been passed to a Trainer yet.
        """
        if not self.parallel_devices:
            raise RuntimeError(
                f"`{self._registered_name}` has no devices yet. Pass it to a Trainer first, or set `parallel_devices`."
            )
        return self.parallel_devices

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return False

    @property
    def num_nodes(self) -> int:
        """Number of nodes, always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise UnsupportedFeatureError(
                f"`{self._registered_name}` runs in one process on one node, got `num_nodes={num_nodes}`."
                ' Set `num_nodes=1`, or use `strategy="ddp"` for several nodes.'
            )

    @property
    def _registered_name(self) -> str:
        return self.strategy_name or type(self).__name__

    @override
    def _configure_launcher(self) -> None:
        if self._layer_sync is not None:
            raise UnsupportedFeatureError(
                f"`{self._registered_name}` cannot synchronise batch normalisation: its replicas share one process and"
                ' no process group. Remove `sync_batchnorm=True`, or use `strategy="ddp"`.'
            )
        processes = 1 if self.cluster_environment is None else self.cluster_environment.world_size()
        if processes > 1:
            raise UnsupportedFeatureError(
                f"`{self._registered_name}` runs in one process, but {type(self.cluster_environment).__name__} reports"
                f" {processes}. Start it as a plain `python` command or with one task, or use"
                ' `strategy="ddp"`.'
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    @override
    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    @override
    def barrier(self, name: str | None = None) -> None:
        pass
