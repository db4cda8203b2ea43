"""SLURM from Debian's packages, with two nodes on this machine.

Its daemons, and all tasks that they start, live in a namespace of processes of their own, which ends with its first
process; and that one ends when its input does. So nothing is left on this machine whatever happens to the tests. Nodes
are called node1 and node2, and tasks find these names in a private /etc/hosts.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import skip
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
LIMIT = 60.0  # seconds for what takes less than one
_JOBS = 9000  # numbers of jobs with other ports
_SYSTEM = os.pathsep.join(("/usr/sbin", "/sbin"))
_TOOLS = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge", "sbatch": "slurm-client", "srun": "slurm-client",
    "unshare": "util-linux",
}  # fmt: skip
_ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED", "BOOT_FAIL"
}  # fmt: skip

# Nothing listens on other addresses than those of the loopback interface, and nothing is kept for accounting. A job
# that is put into the queue again starts after `cred_expire` seconds. Ranks meet at a port that follows from the number
# of their job, so that jobs of two clusters on this machine have other numbers.
_CONFIGURATION = """\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=300
SlurmdParameters=config_overrides
KillWait=3
PropagateResourceLimits=NONE
GresTypes=gpu
NodeName=node1 Port={ports[1]} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:2
NodeName=node2 Port={ports[2]} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# The first process of the namespace. It goes on until its input ends, and everything else ends with it.
_START = """\
set -e
mount --bind hosts /etc/hosts
munged --force --key-file=munge.key --socket="$PWD/munge.sock" --pid-file="$PWD/munged.pid" \\
    --log-file="$PWD/munged.log" --seed-file="$PWD/munge.seed" </dev/null
slurmctld -f "$SLURM_CONF" </dev/null
slurmd -f "$SLURM_CONF" -N node1 </dev/null
slurmd -f "$SLURM_CONF" -N node2 </dev/null
cat >/dev/null
"""


def reason_to_skip():
    """Why SLURM cannot be started here, or None."""
    path = os.pathsep.join((os.environ["PATH"], _SYSTEM))
    missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool, path=path) is None})
    if missing:
        return f"needs the Debian packages {', '.join(missing)}"
    return None if os.geteuid() == 0 else "needs root to start its daemons"


class SlurmCluster:
    """Two nodes with 4 CPUs and 2 pretended GPUs each; close it to end everything."""

    def __init__(self, folder):
        self.folder = Path(folder)
        commands = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], _SYSTEM))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = {
            **kept, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": commands, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "COLUMNS": "120",
        }  # fmt: skip
        self._configure()
        with (self.folder / "start.log").open("w") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "bash", "-c", _START],
                cwd=self.folder, env=self.environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            self._await_nodes()
            failing.pop_all()

    def _configure(self):
        ports = [free_port() for _ in range(3)]
        text = _CONFIGURATION.format(
            folder=self.folder, ports=ports, host=socket.gethostname().partition(".")[0],
            first_job=1 + secrets.randbelow(_JOBS),
        )  # fmt: skip
        for name in ("state", "spool-node1", "spool-node2"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)  # munge asks for this of the folder of its socket
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "plugstack.conf").write_text("")
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (self.folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 node1\n127.0.0.1 node2\n")
        key = self.folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))

    def _await_nodes(self):
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self._process.poll() is None:
            found = subprocess.run(
                ["sinfo", "--noheader", "--format=%T %D"], env=self.environment, capture_output=True, text=True,
                timeout=LIMIT, check=False,
            )  # fmt: skip
            if found.stdout.strip() == "idle 2":
                return
            time.sleep(0.1)
        logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
        raise AssertionError(f"SLURM did not come up: {logs}")

    def call(self, *command, cwd=None, limit=LIMIT, expected=0, **environment):
        """Run a command with SLURM in its environment, and return what it printed."""
        try:
            done = subprocess.run(
                command, cwd=cwd, env={**self.environment, **environment}, capture_output=True, text=True,
                timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            report = self._report(sorted(Path(cwd or self.folder).glob("**/*_log.*")))
            raise AssertionError(f"{command}: no end after {limit:g} s\n{late.stderr}\n{report}") from late
        assert expected is None or done.returncode == expected, f"{command}: {done.returncode}\n{done.stderr}"
        return done.stdout if expected is not None else done

    def _report(self, outputs):
        """The last lines of the daemons and of these files, and the states of nodes and jobs."""
        columns = "JobArrayID,State,Reason,exit_code,TimeUsed,NodeList"
        states = [
            subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=LIMIT, check=False
            ).stdout
            for command in (["sinfo", "--format=%N %T %E"], ["squeue", "--states=all", f"--Format={columns}"])
        ]
        paths = [*sorted(self.folder.glob("slurm*.log")), *outputs]  # the last ones are the last to be cut off
        tails = (f"{path}:\n{path.read_text(errors='replace')[-600:]}" for path in paths)
        return "\n".join([*tails, *states])

    def submit(self, *arguments, cwd):
        """Submit a job in a folder and return its number."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd).strip()

    def show(self, job):
        """What SLURM says about a job."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait(self, job, limit):
        """Wait for the end of a job and return its state."""
        deadline = time.monotonic() + limit
        while (state := self.show(job)["JobState"]) not in _ENDED:
            if time.monotonic() > deadline:
                report = self._report([])
                self.cancel_all()
                raise AssertionError(f"job {job}: no end after {limit:g} s\n{report}\n{self.output(job)[-4000:]}")
            time.sleep(0.2)
        return state

    def output(self, job):
        """What a job has printed."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def variables(self, *command):
        """The variables of SLURM in the first process that `srun ...` or `salloc ...` starts, or in a batch script."""
        if command[0] in ("srun", "salloc"):
            text = self.call(*command, "sh", "-c", 'test "${SLURM_PROCID:-0}" != 0 || env | grep ^SLURM')
        else:
            path = self.folder / f"variables-{secrets.token_hex(4)}"
            job = self.submit(*command, "--output=/dev/null", f"--wrap=env | grep ^SLURM >{path}", cwd=self.folder)
            assert self.wait(job, LIMIT) == "COMPLETED"
            text = path.read_text()
        pairs = (line.partition("=") for line in text.splitlines())
        return {name: value for name, _, value in pairs if name.startswith("SLURM")}

    def cancel_all(self):
        """End all jobs, and wait until the nodes are idle."""
        self.call("scancel", "--user=root")
        deadline = time.monotonic() + LIMIT
        while self.call("squeue", "--noheader"):
            assert time.monotonic() < deadline, "jobs do not end"
            time.sleep(0.2)

    def close(self):
        """End the daemons and everything that they have started."""
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT)
        finally:
            self._process.kill()
            self._process.wait(LIMIT)


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory):
    reason = reason_to_skip()
    if reason:
        skip(f"no SLURM: {reason}")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.fixture
def slurm(_cluster):
    """Two idle nodes."""
    yield _cluster
    _cluster.cancel_all()
