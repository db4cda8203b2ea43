"""What becomes of `ddp_join` when it is told to end: a signal to a random rank at a random moment, many times.

Two processes train in fast steps, with more data on one of them and a validation now and then. SIGTERM or SIGUSR1
comes at any moment. All ranks have to end with the code of the signal, and to leave a checkpoint that can be loaded.
The next run goes on from it, until one comes to its end before its signal does; parameters, buffers and the state of
the optimizer then have to be those of a run without interruption, bit for bit, and the next chain of runs begins.

Run it with `python benchmarks/preemption.py --signals 100`; it takes ten minutes or more, and prints the counts. It
ends with code 1 if any of them is not what it has to be.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
from measuring.command import start_parser
from measuring.comparison import make_columns
from measuring.leaving import RANKS, SIGNALS, Ending, check_checkpoints, run
from rich.console import Console

_SHELL = 128


def main() -> None:
    """Send signals, and count."""
    parser = start_parser(__doc__)
    parser.add_argument("--signals", type=int, default=100, help="how many to send")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, help="file for the counts, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, problems = send_signals(options.signals, random.Random(options.seed), Path(folder))
    table = make_columns(f"{options.signals} signals to one of {RANKS} ranks of `ddp_join`", "", "count")
    for name, count in counts.items():
        table.add_row(name, f"{count}")
    Console().print(table, *problems, sep="\n")
    if options.output is not None:
        options.output.write_text(json.dumps({**counts, "problems": problems}, indent=2))
    raise SystemExit(bool(problems))


def send_signals(number: int, draw: random.Random, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Train in chains of runs until so many signals have been sent; return the counts and the problems."""
    started = run(folder / "whole", False, None, 0, 0.0)
    counts = dict.fromkeys(("clean ends", "loadable checkpoints", "chains that ended as the whole run"), 0)
    problems = [] if len(started.digests) == 1 else [f"the whole run: {started}"]
    sent = chains = saved = 0
    chain = folder / "0"
    while sent < number:
        signum, rank = draw.choice(SIGNALS), draw.randrange(RANKS)
        ending = run(chain, saved > 0, signum, rank, draw.uniform(0.0, 0.7 * started.seconds))
        if ending.is_complete:
            counts["chains that ended as the whole run"] += ending.digests == started.digests
            if ending.digests != started.digests and ending.codes == [0] * RANKS:
                problems.append(f"chain {chains} ended with other parameters")
            chains, saved = chains + 1, 0
            chain = folder / f"{chains}"
            continue
        sent += 1
        loadable, broken = check_checkpoints(chain, lambda path: torch.load(path, weights_only=True))
        counts["clean ends"] += ending.codes == [_SHELL + signum] * RANKS
        counts["loadable checkpoints"] += loadable == saved + 1
        saved = loadable
        problems += [f"signal {sent}: {problem}" for problem in (*broken, *_judge(ending, _SHELL + signum, chain))]
    problems += [f"{name}: {count} of {number}" for name, count in list(counts.items())[:2] if count != number]
    return {"signals": sent, **counts, "chains that came to their end": chains}, problems


def _judge(ending: Ending, code: int, chain: Path) -> list[str]:
    if ending.codes == [code] * RANKS:
        return []
    last = [(chain / f"rank{rank}.log").read_text().splitlines()[-3:] for rank in range(RANKS)]
    return [f"ended with {ending.codes} instead of {code} after {ending.seconds:.1f} s: {last}"]


if __name__ == "__main__":
    main()
