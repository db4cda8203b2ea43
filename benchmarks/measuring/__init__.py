"""What the benchmarks are made of.

A contender's processes (`contender`) sleep until they get an order (`orders`): to fit a model by the Trainer
(`fitting`, `models`), or to train ranks with different amounts of data (`joining`). The same processes host all
contenders in turn (`command`) for some rounds (`rounds`); the times become medians with intervals (`estimates`), ratios
in a table (`comparison`) and a picture (`picture`). Without a clock: which backward passes ours and
its peers get right (`scenarios`, `peers`), and the memory that they take (`memory`).
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for `tests`, whose processes and programs benchmarks run
