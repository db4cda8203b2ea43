import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed import backends
from lightning_ddp_ext.distributed.backends import available_backends, check_backend, check_mpirun
from lightning_ddp_ext.errors import BackendError


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo"])
def test_what_is_there_is_accepted(backend):
    check_backend(backend)
    check_backend(backend, "cpu")


def test_back_ends_of_this_torch_are_listed():
    assert "gloo" in available_backends()
    assert not {"fake", "undefined"} & set(available_backends())


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("mpi", "Use `gloo`, also for processes that `mpirun` starts."),
        ("nccl", "or install a build of torch with CUDA"),
        ("ucc", "Use `gloo` on CPUs"),
        ("cpu:gloo,cuda:nccl", "no backend `nccl`"),
    ],
)
def test_what_torch_was_built_without_is_refused_with_the_alternative(monkeypatch, backend, remedy):
    monkeypatch.setattr(backends, "_BUILT", {**dict.fromkeys(backends._BUILT, lambda: False), "gloo": lambda: True})
    with pytest.raises(BackendError, match="available: gloo") as raised:
        check_backend(backend)
    assert f"`process_group_backend={backend}`" in str(raised.value)
    assert remedy in str(raised.value)


def test_an_unknown_name_is_refused():
    with pytest.raises(BackendError, match=r"no backend `glo`; available: gloo.*Use one of these"):
        check_backend("glo")


def test_a_back_end_for_other_devices_is_refused(monkeypatch):
    monkeypatch.setitem(backends._BUILT, "nccl", lambda: True)
    with pytest.raises(BackendError, match="does not communicate for cpu devices, only for cuda"):
        check_backend("nccl", "cpu")
    check_backend("nccl", "cuda")


def test_a_back_end_of_somebody_else_is_accepted(monkeypatch):
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "theirs"])
    check_backend("theirs", "cpu")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_that_do_not_know_of_each_other_are_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(BackendError, match=rf"started 2 processes \(`{variable}=2`\).*Install `mpi4py`"):
        check_mpirun(started_by_launcher=False)
    check_mpirun(started_by_launcher=True)
    monkeypatch.setenv(variable, "1")
    check_mpirun(started_by_launcher=False)
