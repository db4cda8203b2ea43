import dataclasses
import json
import socket

from lightning_ddp_ext.distributed.interfaces import interface_addresses
from lightning_ddp_ext.distributed.rank_reports import Problem, compare_versions, report_here


def test_a_report_describes_this_host():
    report = report_here([Problem("backend", "none.")])
    assert report.host == socket.gethostname()
    assert report.interfaces == interface_addresses()
    assert {"Python", "torch", "lightning", "lightning-ddp-ext"} <= set(report.versions)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["problems"] == [{"check": "backend", "text": "none."}]


def test_the_address_towards_rank_0_gets_its_interface():
    report = report_here().at("127.0.0.1")
    assert "127.0.0.1" in report.interfaces[report.rendezvous_interface]
    assert report.at("192.0.2.1").rendezvous_interface is None
    assert report.at(None).rendezvous_interface is None


def test_versions_that_differ_are_named_with_the_first_rank_of_each():
    mine = report_here()
    theirs = dataclasses.replace(mine, host="other", versions={**mine.versions, "torch": "1.0"})
    assert compare_versions({0: mine, 1: mine}) == []
    (problem,) = compare_versions({0: mine, 1: mine, 2: theirs, 3: theirs})
    assert problem.check == "versions"
    found = f"{mine.versions['torch']} on rank 0 ({mine.host}), 1.0 on rank 2 (other)"
    assert problem.text.startswith(f"versions of torch differ: {found}. ")
