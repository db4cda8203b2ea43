"""What the README and the examples promise."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=True, cwd=ROOT
    ).stdout


def test_the_readmes_program_prints_what_it_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```python\n(.*?)```", README, re.DOTALL)[1])
    promised = re.search(r"prints, beside Lightning's own lines,\n\n```\n(.*?)```", README, re.DOTALL)[1].splitlines()
    printed = [line for line in run(program).splitlines() if line.startswith(("Single", "Balanced"))]
    assert [line.split(" loss ")[0] for line in printed] == [line.split(" loss ")[0] for line in promised]
    losses = [[float(line.split(" loss ")[1]) for line in lines] for lines in (printed, promised)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "lightning_ddp_ext").rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_are_true(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_example_prints_that_both_runs_agree():
    printed = run("examples/own_module.py")
    assert "one device: {'loss': '0.187834'" in printed
    assert "two replicas: {'loss': '0.187834'" in printed


def test_the_detection_example_prints_that_weights_by_boxes_agree():
    printed = run("examples/detection_batches.py")
    assert "one device: loss 0.547670" in printed
    assert "weight_by=count_boxes: loss 0.547670" in printed
    assert 'weight_by="samples": loss 0.55' in printed


def test_the_metrics_example_prints_equal_values():
    lines = run("examples/metrics.py").splitlines()
    rows = [line for line in lines if re.search(r"\de[+-]\d\d$", line)]
    assert len(rows) > 50
    assert max(float(line.split()[-1]) for line in rows) < 1e-9
