"""Launchers are recognised by their variables."""

import os

import pytest

from lightning_ddp_ext.clusters.launchers import check_mpirun, find_launcher, is_started_alone
from lightning_ddp_ext.errors import BackendError


def test_launchers_are_distinguished_from_interactive_shells(monkeypatch):
    for environ, found, is_alone in (
        ({}, None, False),
        ({"WORLD_SIZE": "1"}, None, True),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE", False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None, True),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS", False),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4000"}, None, False),
    ):
        monkeypatch.setattr(os, "environ", environ)
        assert (find_launcher(), is_started_alone()) == (found, is_alone), environ


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_that_lightning_does_not_recognise_are_rejected(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(BackendError, match=rf"started 2 processes \(`{variable}=2`\).*Install `mpi4py`"):
        check_mpirun(is_launched=False)
    check_mpirun(is_launched=True)
    monkeypatch.setenv(variable, "1")
    check_mpirun(is_launched=False)
