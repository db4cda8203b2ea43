"""What the README and the examples promise."""

import ast
import doctest
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch

import lightning_ddp_ext
from lightning_ddp_ext.batches.weights import WeightBy
from tests.strategies.toolkit import run_on_ranks, selected, values_of
from tests.support.ports import free_port
from tests.support.programs import UNLAUNCHED, run_program
from tests.versions.run import ROWS, describe, lower_bounds, supported_versions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=True, cwd=ROOT
    ).stdout


def test_the_readmes_program_prints_what_it_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```python\n(.*?)```", README, re.DOTALL)[1])
    found = re.search(
        r"Apart from messages of Lightning and of the strategy, this prints\n\n```\n(.*?)```", README, re.DOTALL
    )
    promised = found[1].splitlines()
    printed = [line for line in run(program).splitlines() if line.startswith(("Single", "Balanced"))]
    assert [line.split(" loss ")[0] for line in printed] == [line.split(" loss ")[0] for line in promised]
    losses = [[float(line.split(" loss ")[1]) for line in lines] for lines in (printed, promised)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_pages_state_the_range_of_versions_that_is_required():
    first, *_, last = versions = supported_versions()
    assert ".".join(torch.__version__.split(".")[:2]) in versions
    for page in ("README.md", "docs/index.md", "docs/installation.md"):
        assert f"torch {first} to {last}" in " ".join((ROOT / page).read_text().split()), page
    badges = re.findall(r">([^<>]+)</text>", (ROOT / "docs" / "images" / "badges.svg").read_text())
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert badges[:4] == ["python", f"{pythons[0]} to {pythons[-1]}", "torch", f"{first} to {last}"]
    lightnings = {row.lightning.rpartition(".")[0] for row in ROWS.values()}
    assert badges[4:6] == ["lightning", ", ".join(sorted(lightnings))]


def test_every_supported_version_of_torch_has_a_row_that_has_passed():
    assert list(ROWS) == supported_versions()
    first, bounds = next(iter(ROWS.values())), lower_bounds()
    assert first.torch.startswith(f"{bounds['torch']}.")
    assert first.torchmetrics.startswith(f"{bounds['torchmetrics']}.")
    page = (ROOT / "docs" / "installation.md").read_text()
    assert re.findall(r"^\| 3\..*$", page, re.MULTILINE) == [describe(row) for row in ROWS.values()]


def test_the_conda_recipe_has_the_version_and_the_bounds_of_the_package():
    recipe, project = ((ROOT / name).read_text() for name in ("conda/recipe.yaml", "pyproject.toml"))
    assert f'version: "{lightning_ddp_ext.__version__}"' in recipe
    assert f"\nversion: {lightning_ddp_ext.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    required = re.findall(r"^    - ([\w-]+) (>=\S+)$", recipe, re.MULTILINE)
    missing = [(name, bounds) for name, bounds in required if f'"{name.removeprefix("py")}{bounds}"' not in project]
    assert set(missing) == {("python", ">=3.10")}
    assert 'requires-python = ">=3.10"' in project


def test_the_file_for_coding_assistants_has_names_that_exist():
    text = (ROOT / "docs" / "llms.txt").read_text()
    errors = re.findall(r"^- (\w+Error):", text, re.MULTILINE)
    classes = re.findall(r"`([A-Z]\w+Strategy)`", text)
    assert len(errors) >= 5
    assert len(classes) >= 4
    assert {*errors, *classes, "TokenCount", "ClassWeights"} <= {*lightning_ddp_ext.__all__}
    weights = re.findall(r': `"(\w+)"`', text.partition("## Which weight_by")[2].partition("## Which error")[0])
    assert sorted(weights) == sorted(get_args(get_args(WeightBy)[0]))
    pages = re.findall(r"(\w+\.md)", text.partition("## Pages")[2])
    assert len(pages) > 5
    assert all((ROOT / "docs" / page).is_file() for page in pages)


def test_programs_of_pages_import_names_of_the_package_that_exist():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        (page.name, node.module.replace(".pytorch_lightning", ""), name.name)  # the same names, for another process
        for page in pages
        for code in re.findall(r"^( *```python\n.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
        for node in ast.walk(ast.parse(textwrap.dedent(code).removeprefix("```python\n")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_ddp_ext")
        for name in node.names
    ]
    assert len(found) > 10
    missing = [row for row in found if importlib.util.find_spec(row[1]) is None]
    missing += [row for row in found if row not in missing and not hasattr(importlib.import_module(row[1]), row[2])]
    assert missing == []


def test_programs_of_pages_fit_into_the_column():
    columns = 92  # see extra.css
    programs = [
        (page.name, program)
        for page in sorted((ROOT / "docs").glob("*.md"))
        for program in re.findall(r"^ *```(?:python|bash)\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(programs) > 50
    assert [(page, line) for page, text in programs for line in text.splitlines() if len(line) > columns] == []


def test_cells_of_tables_are_short():
    words = 30  # more are text below the table
    cells = [
        (page.name, cell)
        for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
        for row in re.findall(r"^\|(.*)\|$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
        for cell in re.split(r"(?<!\\)\|", row)
    ]
    assert len(cells) > 1500
    assert [(page, cell) for page, cell in cells if len(cell.split()) > words] == []


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_docstrings_are_true():
    modules = [path for path in (ROOT / "lightning_ddp_ext").rglob("*.py") if ">>>" in path.read_text()]
    assert modules
    for path in modules:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert results.attempted > 0
        assert results.failed == 0, path


ALONE = ("own_module", "detection_batches", "metrics")
ON_RANKS = (
    "multi_task_checkpointing", "gan", "uneven_streams", "exact_evaluation", "finetune_language_model",
)  # fmt: skip
PAGES = {"ddp_checkpoint": 1, "ddp_join": 1, "balanced_ddp": 1, "gradient_reducer": 0, "fabric": 0}


def program_of_page(page):
    """Return the program of a page, and the text of the page after it."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"```python\n(.*?)```(.*?)(?=```python|\Z)", text, re.DOTALL)[PAGES[page]]


@pytest.fixture(scope="module")
def printed_alone():
    """The output of programs of one process."""
    cases = {name: partial(run_program, f"{ROOT}/examples/{name}.py", None) for name in ALONE}
    return run_on_ranks(1, cases, env=UNLAUNCHED)


@pytest.fixture(scope="module")
def printed_on_ranks(request, tmp_path_factory):
    """The output of the programs that were selected, on two ranks."""
    folder = tmp_path_factory.mktemp("programs")
    pages = selected(request, "page")
    for page in pages:
        (folder / f"{page}.py").write_text(program_of_page(page)[0])
    paths = [ROOT / "examples" / f"{name}.py" for name in sorted(selected(request, "name"))]
    paths += [folder / f"{page}.py" for page in sorted(pages)]
    return run_on_ranks(2, {path.stem: partial(run_program, str(path), free_port()) for path in paths})


@pytest.mark.slow
def test_examples_of_replicas_print_that_they_agree_with_one_device(printed_alone):
    printed = {name: values_of(printed_alone, name)[0] for name in ALONE}
    for line in ("one device: {'loss': '0.187834'", "two replicas: {'loss': '0.187834'"):
        assert line in printed["own_module"]
    for line in ("one device: loss 0.547670", "weight_by=count_boxes: loss 0.547670", 'weight_by="samples": loss 0.55'):
        assert line in printed["detection_batches"]
    rows = [line for line in printed["metrics"].splitlines() if re.search(r"\de[+-]\d\d$", line)]
    assert len(rows) > 50
    assert max(float(line.split()[-1]) for line in rows) < 1e-9


def check_agreement(printed):
    between_ranks, to_one_process = re.search(r"between the ranks (\S+), to one process (\S+)", printed).groups()
    assert float(between_ranks) == 0
    assert float(to_one_process) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_an_example_on_two_ranks_prints_that_they_agree_with_each_other_and_with_one_process(printed_on_ranks, name):
    check_agreement(values_of(printed_on_ranks, name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fabric_loop", "plain_torch_loop"])
def test_an_example_starts_its_second_rank(name):
    check_agreement(run(f"examples/{name}.py"))


@pytest.mark.slow
def test_runs_of_virtual_ranks_have_one_hash():
    hashes = re.findall(r"virtual_ranks=(8|None), .* hash (\w{16})$", run("examples/same_bits.py"), re.MULTILINE)
    assert [parts for parts, _ in hashes] == ["8", "8", "None", "None", "8"]
    assert len({found for parts, found in hashes if parts == "8"}) == 1
    assert len({found for _, found in hashes}) == 3


@pytest.mark.slow
def test_ranks_that_map_a_dataset_hold_it_once():
    printed = run("examples/shared_dataset.py", "64")
    (Path(tempfile.gettempdir()) / "rows_64.pt").unlink()
    taken = {how: float(times) for how, times in re.findall(r"(mapped|read): 4 ranks take (\S+) times", printed)}
    assert 0.9 < taken["mapped"] < 1.1
    assert taken["read"] > 3.5


NOTEBOOKS = pytest.mark.parametrize(("name", "pictures"), [("digits", 2), ("two_gpus", 0)])


def outputs_of(notebook):
    """Return the printed lines, and the number of pictures, of a notebook; fail with its errors and warnings."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    printed = "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")
    return printed.splitlines(), sum("image/png" in output.get("data", {}) for output in outputs)


def agrees_with_one_device(printed):
    differences = [float(line.split()[-1]) for line in printed if line.startswith("largest difference to one device")]
    assert len(differences) == 2
    return max(differences) < 1e-12


@NOTEBOOKS
def test_a_notebook_holds_its_outputs(name, pictures):
    printed, drawn = outputs_of(json.loads((ROOT / "examples" / f"{name}.ipynb").read_text()))
    assert agrees_with_one_device(printed)
    assert drawn == pictures


@pytest.mark.slow
@NOTEBOOKS
def test_a_notebook_prints_what_it_holds(name, pictures):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", 4)
    held, _ = outputs_of(notebook)
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    printed, drawn = outputs_of(notebook)
    assert agrees_with_one_device(printed)
    assert drawn == pictures
    assert [line for line in printed if "difference" not in line] == [line for line in held if "difference" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unequal_gpus"])
def test_the_example_of_unequal_devices_prints_that_ddp_is_not_exact(printed_on_ranks, name):
    printed = values_of(printed_on_ranks, name)[0]
    rows = re.findall(r"(\w+), (\d+) and (\d+) samples: .* difference to one process (\S+)", printed)
    runs = [("ddp_checkpoint", "16", "16"), ("ddp_checkpoint", "24", "8"), ("ddp", "24", "8")]
    assert [row[:3] for row in rows] == runs
    assert max(float(row[3]) for row in rows[:2]) < 1e-9 < 1e-3 < float(rows[2][3])
    (shared,) = re.findall(r"balanced_ddp, 32 samples: .* difference to one process (\S+)", printed)
    assert float(shared) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_prints_what_it_says(printed_on_ranks, page):
    promised = re.search(r"```text\n(.*?)```", program_of_page(page)[1], re.DOTALL)[1]
    printed = "".join(values_of(printed_on_ranks, page)).splitlines()
    for line in promised.splitlines():
        assert line.startswith("$") or any(_is_the_same(line, other) for other in printed), printed


def _is_the_same(line, other):
    """Compare numbers as numbers."""
    number = r"-?\d+\.\d+"
    if re.sub(number, "", line) != re.sub(number, "", other):
        return False
    pairs = zip(re.findall(number, line), re.findall(number, other), strict=True)
    return all(float(one) == pytest.approx(float(two), rel=1e-3) for one, two in pairs)
