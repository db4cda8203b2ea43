"""The messages of `RankError` and `RankTimeoutError`."""

from collections.abc import Sequence

from tests.support.rank_processes._rank import Failure, Rank


def describe_failures(ranks: Sequence[Rank], started: float, last_lines: int) -> str:
    """What failed first, what failed after it, and the state of every rank."""
    failures = sorted(
        ((rank.rank, rank.failure) for rank in ranks if rank.failure is not None), key=lambda pair: pair[1].time
    )
    (first, failure), *others = failures
    headline = f"rank {first} of {len(ranks)} {_first_line(failure.summary)}. {_suggest(failure)}"
    if others:
        headline += f" After it failed: {_name_ranks([rank for rank, _ in others])}."
    return "\n".join([headline, *_describe_ranks(ranks, started, last_lines)])


def describe_timeout(ranks: Sequence[Rank], started: float, last_lines: int, timeout: float) -> str:
    """Which ranks did not finish in time, and the state of every rank."""
    unfinished = [rank.rank for rank in ranks if rank.exit_code is None]
    headline = (
        f"{_name_ranks(unfinished)} of {len(ranks)} did not finish within `timeout`={timeout:g} seconds. "
        "The stacks below show where each one was; raise `timeout` if it was only slow."
    )
    return "\n".join([headline, *_describe_ranks(ranks, started, last_lines)])


def _describe_ranks(ranks: Sequence[Rank], started: float, last_lines: int) -> list[str]:
    return [line for rank in ranks for line in _describe_rank(rank, started, last_lines)]


def _describe_rank(rank: Rank, started: float, last_lines: int) -> list[str]:
    lines = ["", f"--- rank {rank.rank} {_describe_state(rank, started)} ---"]
    if rank.failure is not None and rank.failure.traceback:
        lines += rank.failure.traceback.rstrip("\n").split("\n")
    if stack := rank.read_stack() or rank.missing_stack:
        lines += ["Python stack when it was ended:", *_indent(stack.split("\n"))]
    output = rank.read_last_lines(last_lines)
    return lines + (["last lines of output:", *_indent(output)] if output else ["no output"])


def _describe_state(rank: Rank, started: float) -> str:
    if rank.failure is not None:
        return f"{_first_line(rank.failure.summary)} (after {rank.failure.time - started:.1f} s)"
    if rank.exit_code is not None:
        return "finished"
    if rank.has_returned:
        return "not finished: its function returned, but its process went on and was killed"
    return "not finished: it was still running and was killed"


def _suggest(failure: Failure) -> str:
    if failure.traceback:
        return "Its traceback is below."
    if "SIGKILL" in failure.summary:
        return "If nobody sent that signal, the machine ran out of memory: use fewer ranks or less data."
    if "pickled" in failure.summary:
        return "Return numbers, strings, tensors or other plain data."
    return "Its last lines are below."


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
