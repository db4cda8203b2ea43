"""Hosts made of network namespaces, with one network that works and two that do not.

Every host has its own hostname and /etc/hosts, and

    eth0   10.77.0.N, fd00:77::N   connected to the other hosts
    eth1   10.88.N.1               a network of its own: no route to the others
    eth2   10.99.0.N               the same network everywhere, but nothing is connected

A process has torch imported and forks one child per host, which forks one per rank and test. Namespaces belong to
these processes and end with them, so that nothing is left on this machine whatever happens.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds for anything that does not come back; importing torch takes many on a busy machine

# What /etc/hosts of host N says. "wrong" sends everybody to the network without a route.
FLAVOURS = {
    "good": lambda own, n: f"10.77.0.{n} node{n}",
    "debian": lambda own, n: f"127.0.1.1 node{n}" if n == own else f"10.77.0.{n} node{n}",
    "none": lambda own, n: "",
    "wrong": lambda own, n: f"10.88.{n}.1 node{n}",
}


def reason_to_skip():
    """Why hosts cannot be made here, or None."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "eth0", "type", "veth"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"needs root to make network namespaces ({tried.stderr.strip()})"


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    rank: int
    value: object  # what the function returned
    error: str  # type and message of what it raised
    timed_out: bool
    seconds: float
    ended: float  # of `time.monotonic`, which is that of the whole machine
    exit_code: int
    output: str


class Hosts:
    """Hosts 1 to `count`; close it to remove them."""

    def __init__(self, count, folder):
        self.count = count
        self.folder = Path(folder)
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            self._start()
            failing.pop_all()

    def _start(self):
        switch = self._spawn(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        pairs = [socket.socketpair() for _ in range(self.count)]
        for n in range(1, self.count + 1):
            (self.folder / f"hosts{n}").write_text("")
        theirs = [end.fileno() for _, end in pairs]
        self._spawn(
            [sys.executable, "-m", "tests.distributed.rank_server", str(self.folder), *map(str, theirs)],
            pass_fds=theirs, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for _, end in pairs:
            end.close()
        for own, _ in pairs:
            own.settimeout(LIMIT)
            self._stack.enter_context(own)
        self._lines = [self._stack.enter_context(own.makefile("rw")) for own, _ in pairs]
        self._pids = [int(lines.readline()) for lines in self._lines]
        self._connect(switch.pid)

    def _spawn(self, command, **options):
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)

        def end():
            if process.stdin:
                process.stdin.close()
            process.terminate()
            process.wait(LIMIT)

        self._stack.callback(end)
        return process

    def _connect(self, switch):
        self._ip(switch, ["link set lo up", "link add br0 type bridge forward_delay 0", "link set br0 up"])
        for n, host in enumerate(self._pids, start=1):
            self._ip(switch, [f"link add eth{i} netns {host} type veth peer name p{i}-{n}" for i in range(3)])
            self._ip(switch, [f"link set p0-{n} master br0", *(f"link set p{i}-{n} up" for i in range(3))])
            self.configure(
                n,
                "link set lo up",
                f"addr add 10.77.0.{n}/24 dev eth0",
                f"-6 addr add fd00:77::{n}/64 dev eth0 nodad",
                f"addr add 10.88.{n}.1/24 dev eth1",
                f"addr add 10.99.0.{n}/24 dev eth2",
                *(f"link set eth{i} up" for i in range(3)),
            )

    def _ip(self, pid, lines):
        for line in lines:
            command = ["nsenter", "-t", str(pid), "-n", "ip", *line.split()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            assert done.returncode == 0, f"{line}: {done.stderr}"

    def configure(self, host, *lines):
        """Run `ip` with each of the lines on a host."""
        self._ip(self._pids[host - 1], lines)

    def run(self, function, ranks, *, flavour="good", limit=30.0):
        """Call a function of `rank_programs` on several ranks, each in a new process under a hard limit.

        `ranks` holds (host, arguments) of rank 0, 1, ...; an argument "env" is added to the environment.
        """
        for n in range(1, self.count + 1):
            lines = ["127.0.0.1 localhost", *(FLAVOURS[flavour](n, m) for m in range(1, self.count + 1))]
            (self.folder / f"hosts{n}").write_text("".join(f"{line}\n" for line in lines))
        by_host = {host: [] for host, _ in ranks}
        for rank, (host, arguments) in enumerate(ranks):
            by_host[host].append({"rank": rank, "arguments": arguments})
        for host, jobs in by_host.items():
            lines = self._lines[host - 1]
            print(json.dumps({"function": function, "jobs": jobs, "limit": limit}), file=lines, flush=True)
        outcomes = [Outcome(**row) for host in by_host for row in json.loads(self._lines[host - 1].readline())]
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def close(self):
        """End the processes, and with them the hosts."""
        self._stack.close()
