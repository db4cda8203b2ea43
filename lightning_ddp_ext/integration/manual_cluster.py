"""Several hosts without a launcher: the same command on each, with its number."""

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

_PORTS = range(1, 2**16)


class ManualEnvironment(LightningEnvironment):
    """Tells Lightning where a host is in a run that somebody starts by hand, once on every host.

    Lightning starts the processes of each host, as on a single one. Pass it to the Trainer,
    `Trainer(plugins=[ManualEnvironment(...)], num_nodes=2)`.

    Args:
        num_nodes: Number of hosts.
        node_rank: The number of this host, 0 for the one that others connect to.
        main_address: Name or address of host 0.
        main_port: A free port there, the same on all hosts.

    Raises:
        ValueError: If a number is out of range or the address is empty.
    """

    def __init__(self, *, num_nodes: int, node_rank: int, main_address: str, main_port: int = 29500) -> None:
        super().__init__()
        if num_nodes < 1:
            raise ValueError(f"`num_nodes` must be at least 1, got {num_nodes}. Use the number of hosts.")
        if not 0 <= node_rank < num_nodes:
            raise ValueError(
                f"`node_rank` must be at least 0 and below `num_nodes={num_nodes}`, got {node_rank}."
                " Number the hosts from 0."
            )
        if not main_address:
            raise ValueError("`main_address` is empty. Use a name or an address of the host with `node_rank=0`.")
        if main_port not in _PORTS:
            raise ValueError(f"`main_port` must be between 1 and 65535, got {main_port}. Use 29500 if unsure.")
        self._num_nodes = num_nodes
        self._node_rank = node_rank
        self._address = main_address
        self._port = main_port

    @property
    @override
    def main_address(self) -> str:
        return self._address

    @property
    @override
    def main_port(self) -> int:
        return self._port

    @override
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_nodes != self._num_nodes:
            raise ValueError(
                f"`num_nodes={num_nodes}` of the Trainer differs from `num_nodes={self._num_nodes}` of the cluster."
                " Give both the number of hosts."
            )
