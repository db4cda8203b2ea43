import pytest
import torch.distributed as dist

from lightning_ddp_ext.distributed import backends
from lightning_ddp_ext.distributed.backends import available_backends, check_backend, check_mpirun
from lightning_ddp_ext.errors import BackendError


def test_available_backends_are_accepted_and_listed():
    for backend in (None, "gloo", "GLOO", "cpu:gloo"):
        check_backend(backend)
        check_backend(backend, "cpu")
    assert "gloo" in available_backends()
    assert not {"fake", "undefined"} & set(available_backends())


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("mpi", "Use `gloo`, also for processes that `mpirun` starts."),
        ("nccl", "or install a build of torch with CUDA"),
        ("ucc", "Use `gloo` on CPUs"),
        ("cpu:gloo,cuda:nccl", "no backend `nccl`"),
        ("glo", "no backend `glo`; available: gloo. Use one of these"),
    ],
)
def test_a_backend_missing_from_torch_is_rejected_with_the_alternative(monkeypatch, backend, remedy):
    monkeypatch.setattr(backends, "_BUILT", {**dict.fromkeys(backends._BUILT, lambda: False), "gloo": lambda: True})
    with pytest.raises(BackendError, match="available: gloo") as raised:
        check_backend(backend)
    assert f"`process_group_backend={backend}`" in str(raised.value)
    assert remedy in str(raised.value)


def test_a_backend_for_other_devices_is_rejected_and_a_registered_one_is_accepted(monkeypatch):
    monkeypatch.setitem(backends._BUILT, "nccl", lambda: True)
    with pytest.raises(BackendError, match="does not communicate for cpu devices, only for cuda"):
        check_backend("nccl", "cpu")
    check_backend("nccl", "cuda")
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "theirs"])
    check_backend("theirs", "cpu")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_that_lightning_does_not_recognise_are_rejected(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(BackendError, match=rf"started 2 processes \(`{variable}=2`\).*Install `mpi4py`"):
        check_mpirun(is_launched=False)
    check_mpirun(is_launched=True)
    monkeypatch.setenv(variable, "1")
    check_mpirun(is_launched=False)
