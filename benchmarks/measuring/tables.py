"""Results as tables for people."""

from collections.abc import Iterable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from measuring.estimates import FEWEST, Estimate
from measuring.models import TINY
from measuring.results import BALANCED, DDP, LockResult, OverheadResult, StepResult
from measuring.rounds import MOST_BY_OTHERS, Measurement

NOT_SOUND = "too noisy"


def make_step_table(results: Mapping[str, StepResult]) -> Table:
    """Show the time of a training step of each model, and `balanced_dp`'s ratio to the others."""
    any_load = any(result.measurement.any_load for result in results.values())
    table = start_table("Time of a training step in milliseconds", any_load)
    columns = ("one device\n(threads)", DDP, BALANCED, f"{BALANCED} /\nbest one device", f"{BALANCED} /\n{DDP}")
    add_columns(table, "model", *columns, "rounds\ncounted")
    for model, result in results.items():
        best = result.best_device
        devices = Text("\n").join(
            Text(
                f"{format_milliseconds(result.measurement.time(name))} ({threads})",
                "bold" if name == best else "dim",
            )
            for threads, name in result.devices.items()
        )
        table.add_row(
            model,
            devices,
            format_milliseconds(result.measurement.time(DDP)),
            format_milliseconds(result.measurement.time(BALANCED)),
            format_estimate(result.ratio_to_device),
            format_estimate(result.ratio_to_ddp),
            format_rounds(result.measurement),
        )
    return table


def make_overhead_table(result: OverheadResult) -> Table:
    """Show what starting and each step cost with a model that costs nothing."""
    title = "What the strategy costs by itself, with a linear layer, in milliseconds"
    table = start_table(title, result.measurement.any_load)
    columns = ("fit until\nfirst step", "first\nstep", "later\nstep", "later step minus\none device's")
    add_columns(table, "strategy\n(replicas)", *columns, "each logged\nvalue")
    table.caption = f"{table.caption} Rounds counted: {format_rounds(result.measurement)}."
    for name in result.names:
        table.add_row(
            name,
            format_milliseconds(result.start_up(name)),
            format_milliseconds(result.first_step(name)),
            format_milliseconds(result.step(name)),
            "" if name == result.names[0] else format_estimate(result.more_per_step(name), 1000, "+.2f"),
            format_estimate(result.per_key(name), 1000, ".3f"),
        )
    return table


def make_lock_table(result: LockResult) -> Table:
    """Show what plain threads gain by sharing a batch."""
    title = f"{TINY} in bare threads, in milliseconds: what Python's lock leaves to gain"
    table = start_table(title, result.measurement.any_load)
    add_columns(
        table, "", "1 thread,\nwhole batch", "1 thread,\nhalf of it", "2 threads,\nhalf each", "2 threads / 1 thread"
    )
    table.caption = f"{table.caption} Rounds counted: {format_rounds(result.measurement)}."
    for passes in result.PASSES:
        times = [format_milliseconds(result.time(passes, *way)) for way in result.WAYS]
        table.add_row(passes, *times, format_estimate(result.ratio(passes)))
    return table


def explain_lock(result: LockResult, steps: StepResult | None) -> str:
    """Say how much of the ratio of tiny layers no strategy with two threads can avoid."""
    if steps is None:
        return "Floor: not known without the training steps of the same model."
    ratio, floor = steps.ratio_to_device, result.floor(steps)
    if ratio is None or floor is None:
        return "Floor: not known, as too few rounds were quiet."
    return (
        f"Floor: two threads that cost nothing but forward and backward as above would take {floor:.2f} times the best"
        f" one device. Measured: {ratio.median:.2f}, so the strategy itself accounts for {ratio.median - floor:+.2f}."
    )


def start_table(title: str, any_load: bool) -> Table:
    """Begin a table of what was measured in rounds, whose caption says what its numbers are."""
    caption = "Medians over rounds with exact 95 % intervals; ratios and differences are taken within a round."
    if any_load:
        title += "\nALL ROUNDS COUNT, HOWEVER BUSY THE MACHINE WAS"
    else:
        caption += (
            f" A round counts if other processes had at most {MOST_BY_OTHERS:.0%} of the cores' time in each turn;"
            f' with fewer than {FEWEST} such rounds, "{NOT_SOUND}".'
        )
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))


def add_columns(table: Table, first: str, *others: str) -> None:
    """Add columns, of which all but the first hold numbers."""
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)


def format_estimate(estimate: Estimate | None, factor: float = 1.0, number: str = ".2f") -> str:
    """Write a median with its interval."""
    if estimate is None:
        return NOT_SOUND
    median, low, high = (f"{factor * value:{number}}" for value in (estimate.median, estimate.low, estimate.high))
    return f"{median} [{low}, {high}]"


def format_milliseconds(estimate: Estimate | None) -> str:
    """Write the median of seconds."""
    return "-" if estimate is None else f"{1000 * estimate.median:.2f}"


def format_rounds(measurement: Measurement) -> str:
    """Write how many rounds count."""
    return f"{len(measurement.counted)} of {len(measurement.rounds)}"


def describe_stolen(measurements: Iterable[Measurement]) -> str:
    """Say how much the hypervisor took, which is not held against a round."""
    shares = [measurement.stolen for measurement in measurements]
    return f"A hypervisor took {min(shares):.1%} to {max(shares):.1%} of the cores' time (medians over turns)."
