"""Forks a child per rank, so that torch is imported once; on hosts that it makes for `hosts.Hosts`, or on this one."""

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

_NEW_MOUNTS, _NEW_NAMES, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000  # `os.unshare` came with Python 3.12


def main(folder, connections):
    """Make a host per connection, and serve requests that come over it until it is closed."""
    programs = importlib.import_module("tests.distributed.rank_programs")
    children = []
    for number, descriptor in enumerate(connections, start=1):
        pid = os.fork()
        if pid == 0:
            become_host(number, folder / f"hosts{number}")
            with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as lines:
                serve(programs, folder, lines)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # nothing to tidy up, and leaving everything imported takes seconds


def become_host(number, hosts_file):
    """Leave this machine's network, mounts and name; they end with this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_NAMES | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", str(hosts_file), "/etc/hosts"], check=True)
    socket.sethostname(f"node{number}")


def serve(programs, folder, lines):
    """Announce this process, and answer one request per line."""
    print(os.getpid(), file=lines, flush=True)
    for line in lines:
        request = json.loads(line)
        answer = run(getattr(programs, request["function"]), request["jobs"], request["limit"], folder)
        print(json.dumps(answer), file=lines, flush=True)


def run(function, jobs, limit, folder):
    """Call `function(**job["arguments"])` in a process for each job, under a hard limit, and describe the outcomes.

    Processes that have been stopped are killed when all others have ended: nobody is left to wake them.
    """
    started = time.monotonic()
    children = {}
    for job in jobs:
        path = folder / f"{os.getpid()}-{job['rank']}"
        pid = os.fork()
        if pid == 0:
            work(function, job["arguments"], path)
        children[pid] = (job["rank"], path)
    ended, stopped, timed_out = {}, set(), set()
    while running := children.keys() - ended.keys():
        for pid in running:
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif changed:
                ended[pid] = (time.monotonic(), os.waitstatus_to_exitcode(status))
            elif time.monotonic() - started > limit and pid not in timed_out:
                os.kill(pid, signal.SIGKILL)
                timed_out.add(pid)
        if running <= stopped:
            for pid in running - ended.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [describe(*children[pid], started, *ended[pid], pid in timed_out) for pid in children]


def work(function, arguments, path):
    """In the child: call the function and leave what it returned or raised behind."""
    try:
        output = os.open(f"{path}.out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.environ.update(arguments.pop("env", {}))
        try:
            result = {"value": function(**arguments)}
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(f"{path}.json").write_text(json.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def describe(rank, path, started, ended, exit_code, timed_out):
    left = Path(f"{path}.json")
    result = json.loads(left.read_text()) if left.exists() else {}
    left.unlink(missing_ok=True)
    return {
        "rank": rank,
        "value": result.get("value"),
        "error": result.get("error", ""),
        "timed_out": timed_out,
        "seconds": ended - started,
        "ended": ended,
        "exit_code": exit_code,
        "output": Path(f"{path}.out").read_text(errors="replace"),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(descriptor) for descriptor in sys.argv[2:]])
