"""Prints what `lightning-ddp-ext doctor` says about hosts that are healthy, and about some that are not.

The hosts are network namespaces of this machine; root makes them.

    python benchmarks/doctor.py
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ADDRESS = "10.77.0.1"  # of the first host


def main() -> None:
    """Print the commands, and what each host wrote."""
    sys.path.insert(0, str(ROOT))
    from tests.distributed.hosts import Hosts, reason_to_skip

    reason = reason_to_skip()
    if reason:
        raise SystemExit(f"benchmarks/doctor.py: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(2, folder)
        try:
            show(hosts, "two hosts", 29500, ["network=auto"])
            show(
                hosts, "an interface that does not connect them", 29501, ["network=interface", "network.interface=eth1"]
            )
            hosts.configure(2, f"route add unreachable {ADDRESS}/32")
            show(hosts, "a host without a route to rank 0", 29502, ["network=auto"])
        finally:
            hosts.close()


def show(hosts: Any, title: str, port: int, overrides: Sequence[str]) -> None:
    """Run the command on both hosts.

    Args:
        hosts: The hosts.
        title: What is shown.
        port: A port that has not been used yet.
        overrides: What the command is given beside the numbers of the hosts.
    """
    command = ["strategy=ddp_join", "trainer.devices=1", "trainer.accelerator=cpu", *overrides, "--timeout=5"]
    places = ["cluster=manual", "cluster.num_nodes=2", f"cluster.main_address={ADDRESS}", f"cluster.main_port={port}"]
    ranks = [
        (rank + 1, {"arguments": [*command, *places, f"cluster.node_rank={rank}"], "folder": str(hosts.folder)})
        for rank in range(2)
    ]
    print(f"== {title}: {' '.join(overrides)}", flush=True)
    for outcome in hosts.run("diagnose", ranks, flavour="debian", limit=120):
        code = outcome.value["code"] if outcome.value else "none"
        print(f"-- node{outcome.rank + 1}, exit code {code}, after {outcome.seconds:.1f} s")
        print((outcome.value or {}).get("stdout", ""), outcome.output, sep="", flush=True)


if __name__ == "__main__":
    main()
