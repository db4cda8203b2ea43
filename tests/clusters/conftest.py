import pytest

from tests.clusters.slurm import SlurmCluster, reason_to_skip
from tests.conftest import skip


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
