"""Several nodes without a launcher: the same command on each, with its number."""

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from lightning_ddp_ext._validation import check_host, check_integer
from lightning_ddp_ext.clusters.launchers import check_num_nodes

_LAST_PORT = 2**16 - 1
_MOST_NODES = 2**16


class ManualEnvironment(LightningEnvironment):
    """Position of a node in a run that somebody starts by hand, once on every node.

    Lightning starts the processes of each node, as on a single one. Pass it to the Trainer,
    `Trainer(plugins=[ManualEnvironment(...)], num_nodes=2)`.

    Args:
        num_nodes: Number of nodes.
        node_rank: The number of this node, 0 for the one that others connect to.
        main_address: Name or address of node 0.
        main_port: A free port there, the same on all nodes.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range, or the address is malformed.
    """

    def __init__(self, *, num_nodes: int, node_rank: int, main_address: str, main_port: int = 29500) -> None:
        super().__init__()
        check_integer("num_nodes", num_nodes, least=1, most=_MOST_NODES, remedy="Use the number of nodes.")
        check_integer("node_rank", node_rank, most=num_nodes - 1, remedy="Number the nodes from 0.")
        check_host("main_address", main_address, "Use a name or an address of the node with `node_rank=0`.")
        check_integer("main_port", main_port, least=1, most=_LAST_PORT, remedy="Use 29500 if unsure.")
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
        check_num_nodes(num_nodes, self._num_nodes)
