"""The subcommand `verify`: whether several devices train what one device trains, and if not, which line is why."""

import argparse
import json
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils.data import DataLoader

from lightning_ddp_ext._import_names import choose, lightning_of
from lightning_ddp_ext.errors import ImpossibleError, describe_error, with_remedy_for_cuda

if TYPE_CHECKING:
    from lightning_ddp_ext.verification import Report

_STYLES = {"ok": "green", "note": "yellow", "finding": "bold red"}
_FINDING, _IMPOSSIBLE = 1, 2  # exit codes


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = _parse(arguments)
    errors = Console(stderr=True)
    try:
        model, data = _make(options)
        choose(lightning_of(type(model)))  # of the two import names
        from lightning_ddp_ext.verification import verify

        with errors.status("importing") as status:
            report = verify(model, data, **_strategy(options), limit=options.limit, progress=status.update)
    except ImpossibleError as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"lightning-ddp-ext verify: nothing was verified: {error}.", file=sys.stderr)
        return _IMPOSSIBLE
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if report.findings:
        return _FINDING
    return 0 if report.use else _IMPOSSIBLE  # without a strategy, the time was over before anything was proved


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-ddp-ext verify",
        description="Checks on CPUs, within seconds, whether several devices train what one device trains, and names"
        " the line that is the reason if not, with a remedy. A few steps run in one process and on two and three ranks."
        " No file is written, except by the module itself.",
        epilog="Exit code: 0 if several devices train what one device trains, 1 if not, 2 if that could not be checked."
        " Example: lightning-ddp-ext verify my_package.models:Model --data my_package.data:Data model.width=8",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="path of a LightningModule: its class, an object, or a function that returns it,"
                        " as in my_package.models:Model")  # fmt: skip
    parser.add_argument("--data", metavar="PATH", help="path of a LightningDataModule or a DataLoader, likewise")
    parser.add_argument("--batch", metavar="FILE", help="a batch that `torch.save` has written, instead of --data")
    parser.add_argument("--strategy", metavar="NAME", help="strategy to check besides ddp: ddp_join, balanced_ddp,"
                        " ddp_checkpoint, or the path of an object or of a function that returns it")  # fmt: skip
    parser.add_argument("--weight_by", metavar="NAME", help="its `weight_by`: samples, tokens, equal, sum, or the path"
                        " of a function of a batch; without it, the one that fits")  # fmt: skip
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which all ends (%(default)g)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "arguments", nargs="*", help="arguments of the model and the data, as in model.width=8 data.size=4"
    )
    options = parser.parse_intermixed_args(arguments)
    if not options.limit > 0:
        parser.error(f"`--limit` must be above 0 seconds, got {options.limit:g}. Use 120, the default.")
    if options.data and options.batch:
        parser.error("`--data` and `--batch` exclude each other. Leave one out.")
    return options


def _make(options: argparse.Namespace) -> tuple[Any, Any]:
    """Make the model and the data of the command line."""
    try:
        given = OmegaConf.to_container(OmegaConf.from_dotlist(options.arguments))
    except Exception as error:
        raise ImpossibleError(f"the arguments cannot be read: {describe_error(error)}") from error
    assert isinstance(given, Mapping)
    unknown = [str(key) for key, value in given.items() if key not in ("model", "data") or not isinstance(value, dict)]
    if unknown:
        raise ImpossibleError(f"`{unknown[0]}` is no argument of the model or the data. Write model.<name>=<value>")
    model = _load(options.model, given.get("model", {}), "LightningModule")
    if options.batch is None:
        kinds = ("LightningDataModule", "DataLoader")
        return model, None if options.data is None else _load(options.data, given.get("data", {}), *kinds)
    try:
        batch = torch.load(options.batch, weights_only=True)
    except Exception as error:
        raise ImpossibleError(
            f"`--batch {options.batch}` cannot be read: {describe_error(error)}. Save tensors, and lists and"
            " dictionaries of them, with `torch.save`"
        ) from error
    batches: Any = [batch]
    return model, DataLoader(batches, batch_size=None)


def _strategy(options: argparse.Namespace) -> dict[str, Any]:
    """Return the strategy and the `weight_by` of the command line: names, or objects at paths."""
    given = {"strategy": options.strategy, "weight_by": options.weight_by}
    if given["strategy"] and ":" in given["strategy"]:
        given["strategy"] = _load(given["strategy"], {}, "Strategy")
    if given["weight_by"] and ":" in given["weight_by"]:
        given["weight_by"] = _load(given["weight_by"], {})
    return given


def _load(path: str, arguments: Mapping[str, Any], *kinds: str) -> Any:
    """Return the object at `package.module:name`, of a class with one of these names; a class or function is called.

    Without such names, it is returned as it is.
    No Lightning has been imported before: the program of the user decides which one that is.
    """
    try:
        found = pkgutil.resolve_name(path)
        if kinds and not _is_one(found, kinds):
            found = found(**arguments)
    except Exception as error:
        raise ImpossibleError(with_remedy_for_cuda(f"`{path}` cannot be made: {describe_error(error)}")) from error
    if not kinds or _is_one(found, kinds):
        return found
    raise ImpossibleError(f"`{path}` is a {type(found).__name__}, not a {' or a '.join(kinds)}")


def _is_one(value: Any, kinds: Sequence[str]) -> bool:
    return any(base.__name__ in kinds for base in type(value).__mro__)


def _print(report: "Report") -> None:
    table = Table(title="Several devices and one device", title_justify="left")
    for column in ("check", "verdict", "found"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        text = Text(check.text)
        for line, style in ((check.where, "bold"), (check.remedy and f"Remedy: {check.remedy}.", "")):
            if line:
                text.append("\n").append(line, style=style)
        table.add_row(check.name, Text(check.verdict, style=_STYLES[check.verdict]), text)
    console = Console()
    console.print(table)
    console.print(f"{report.seconds:.1f} s after the imports", highlight=False)
    count = f"{len(report.findings)} of {len(report.checks)} checks have found something, so that the exit code is 1"
    use = f"Use Trainer({report.use})."
    if report.plain not in ("", report.use):
        use = f"Use Trainer({report.plain}) if devices and their batches are alike, Trainer({report.use}) if not."
    for is_shown, line, style in (
        (report.findings, f"{count}: several devices train something else unless you follow the remedies.", ""),
        (report.use, use, "bold"),
        (report.unproved, f"Not compared, for the reasons in the table: {', '.join(report.unproved)}.", ""),
        (not (report.findings or report.use), "No strategy is proved, so that the exit code is 2.", ""),
    ):
        if is_shown:
            console.print(line, highlight=False, style=style)
