"""The findings, as rows of a table and the strategy to use."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "note", "finding"]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the result.

    Attributes:
        name: Name of the check.
        verdict: `"ok"`; `"finding"`, if several devices train something else; `"note"`, if that is so by nature, as
            with batch normalisation, or if something could not be compared.
        text: The finding, in words.
        where: File and line, and the line itself; empty if there is none.
        remedy: What to do; empty if nothing.
        compared: Whether a comparison was possible; if not, the text has the reason.
    """

    name: str
    verdict: Verdict
    text: str
    where: str = ""
    remedy: str = ""
    compared: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `verify`.

    Attributes:
        checks: The checks, in order.
        use: The strategy to use, as arguments of the Trainer; empty if none trains what one device trains.
        plain: Lightning's `ddp` in the same form, to use where devices and their batches are alike; empty if it is not
            proved.
        seconds: How long it took.
    """

    checks: list[Check]
    use: str
    plain: str
    seconds: float = field(compare=False)

    @property
    def findings(self) -> list[Check]:
        """The checks that have found something."""
        return [check for check in self.checks if check.verdict == "finding"]

    @property
    def unproved(self) -> list[str]:
        """Names of the checks that could not compare."""
        return [check.name for check in self.checks if not check.compared]

    def raise_for_findings(self) -> None:
        """Raise an `AssertionError` that names all findings, if there are any, or if no strategy is proved."""
        blocks = [
            "\n  ".join(filter(None, (f"{one.name}: {one.text}", one.where, one.remedy and f"Remedy: {one.remedy}.")))
            for one in self.findings
        ]
        if blocks:
            raise AssertionError("several devices do not train what one device trains.\n\n" + "\n\n".join(blocks))
        if not self.use:
            raise AssertionError(f"nothing is proved: {', '.join(self.unproved)}. The checks have the reasons.")


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
