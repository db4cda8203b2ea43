"""Run whole programs: in processes of their own, or on ranks that have torch and Lightning imported."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.exchange import destroy_group

# Variables that a program of one process does not find.
UNLAUNCHED = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run_python(
    *arguments: object, code: int | None = 0, limit: float = 280.0, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with `env` added to the environment; fails unless it exits with a code, None for any."""
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **(env or {})}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit, check=False, **options
    )
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def run_program(path: str, port: int | None, folder: str) -> str:
    """Run a program on this rank, as a launcher does; returns the text on stdout.

    Each program needs another `port`, since a rank may get to the next one while another rank uses the last.
    """
    printed, dtype = io.StringIO(), torch.get_default_dtype()
    with (
        mock.patch.dict(os.environ, {} if port is None else {"MASTER_PORT": str(port)}),  # Lightning deletes others
        mock.patch.object(sys, "argv", [path]),
        mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
        contextlib.redirect_stdout(printed),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            raise RuntimeError(f"{path} ended with {end.code!r}: {printed.getvalue()}") from end
        finally:
            torch.set_default_dtype(dtype)
            if dist.is_initialized():
                destroy_group()
    return printed.getvalue()
