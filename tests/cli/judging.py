"""How many mutations are drawn, and what becomes of them."""

import os

MUTATIONS = int(os.environ.get("LIGHTNING_DDP_EXT_MUTATIONS", "500"))
SHARE = 0.12  # of command lines, which take most of the time; the others are arguments of constructors
SEED = 6


def report(kind, mutations, problems, refused, capsys):
    with capsys.disabled():
        print(f"\n{len(mutations)} {kind}: {refused} refused, {len(mutations) - refused} accepted", end=" ")
    assert not problems, f"{len(problems)} of {len(mutations)}:\n" + "\n".join(problems)
