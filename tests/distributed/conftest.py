import itertools

import pytest

from tests.conftest import skip
from tests.distributed.hosts import Hosts, reason_to_skip


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    reason = reason_to_skip()
    if reason:
        skip(f"no hosts of network namespaces: {reason}")
    made = Hosts(2, tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def ports():
    """Ports of the hosts that no test has used yet; nothing else runs there."""
    return itertools.count(29500)
