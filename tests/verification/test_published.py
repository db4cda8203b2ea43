"""`verify` finds bugs of public projects, and nothing in the same modules without them."""

import pytest

from lightning_ddp_ext.verification import ImpossibleError, verify
from tests.verification import published
from tests.verification.modules import Module, but_slow, line_of, make_data


def findings_of(module, data=None):
    report = verify(module, make_data() if data is None else data, limit=120)
    return report, [check.where for check in report.findings]


@pytest.mark.parametrize(
    "bug", but_slow([*published.OF_GRADIENTS, *published.OF_VALIDATION], published.ValidationByBatches)
)
def test_a_bug_is_found_and_its_line_is_named(bug):
    _, found = findings_of(bug())
    assert any(line_of(bug) in where for where in found), found


@pytest.mark.slow
def test_a_division_by_a_number_of_all_ranks_has_its_own_remedy():
    report, _ = findings_of(published.BoxesOfAllRanks())
    assert all("divide by the mean of the ranks' numbers" in check.remedy for check in report.findings)
    assert [check.text for check in report.findings][1:] == [
        "the gradient is the one of one process, divided by the number of ranks"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("bug", published.WITHOUT_A_LINE)
def test_ranks_that_do_not_synchronise_are_found(bug):
    report, _ = findings_of(bug())
    assert "ranks end with different values: parameter `first.weight`" in str(report.findings)
    assert report.use == ""


@pytest.mark.parametrize("bug", but_slow(published.OF_SAMPLES, published.SameStream))
def test_data_that_is_the_same_on_all_ranks_is_found(bug):
    data = published.OF_SAMPLES[bug](published.SameStream() if bug is published.SameStream else make_data().dataset)
    report, found = findings_of(Module(), data)
    assert any(line_of(bug) in where for where in found), found
    assert report.use == 'strategy="balanced_ddp"'


def test_a_stream_that_each_rank_reads_in_part_is_no_finding():
    report, found = findings_of(Module(), published.OF_SAMPLES[published.SameStream](published.PartOfStream()))
    assert (found, report.use) == ([], 'strategy="ddp_join"')


def test_samples_that_ddp_validates_twice_are_a_note():
    report, found = findings_of(published.RepeatedValidation())
    assert found == []
    assert "`ddp` repeats samples of validation loader 0" in str(report.checks)


def test_validation_data_that_cannot_be_read_is_a_note():
    report, found = findings_of(published.WithoutValidationData())
    assert found == []
    assert "not compared: FileNotFoundError: no such file" in str(report.checks)


def test_weights_without_a_gradient_are_refused():
    with pytest.raises(ImpossibleError, match="the gradient of the first batch is zero"):
        findings_of(published.Dead())


@pytest.mark.parametrize("module", but_slow(published.WITHOUT_A_BUG, published.ValidationOverRanks))
def test_nothing_is_found_without_a_bug(module):
    report, found = findings_of(module(), make_data(batch_size=12))  # enough for three ranks
    assert found == []
    assert report.use
