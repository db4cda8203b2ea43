from pathlib import Path

import pytest

from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint, parse_init_method


@pytest.mark.parametrize(
    ("text", "endpoint", "written"),
    [
        (None, RendezvousEndpoint(), None),
        ("env://", RendezvousEndpoint(), None),
        ("tcp://node1:29501", RendezvousEndpoint("node1", 29501), "node1:29501"),
        ("tcp://10.0.0.1:29501/", RendezvousEndpoint("10.0.0.1", 29501), "10.0.0.1:29501"),
        ("tcp://[fd00::1]:29501", RendezvousEndpoint("fd00::1", 29501), "[fd00::1]:29501"),
        ("file:///shared/meeting", RendezvousEndpoint(path=Path("/shared/meeting")), "/shared/meeting"),
    ],
)
def test_endpoints_are_parsed_and_written(text, endpoint, written):
    assert parse_init_method(text) == endpoint
    assert written is None or str(endpoint) == written


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("node1:29501", "is of no known form. Use `env://`, `tcp://host:port` or `file:///path`"),
        ("http://node1:29501", "is of no known form"),
        ("env://node1", "is of no known form"),
        ("tcp://node1", "needs a host and a port"),
        ("tcp://:29501", "needs a host and a port"),
        ("tcp://node1:port", "Use `env://`"),
        ("tcp://node1:99999", "Use `env://`"),
        ("tcp://node1:29501/path", "needs a host and a port"),
        ("tcp://node1:29501?rank=0", r"leave out `\?rank=0`"),
        ("file://relative/path", "needs an absolute path"),
        ("file:///", "needs an absolute path"),
    ],
)
def test_other_forms_are_rejected(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_init_method(text)
