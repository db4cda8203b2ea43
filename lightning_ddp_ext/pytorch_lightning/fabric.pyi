# What type checkers see; when the program runs, these are the package's strategies, loaded a second time.
import lightning_fabric.strategies as theirs

from lightning_ddp_ext import fabric as ours

class BalancedDDPStrategy(ours.BalancedDDPStrategy, theirs.DDPStrategy): ...  # type: ignore
class DDPCheckpointStrategy(ours.DDPCheckpointStrategy, theirs.DDPStrategy): ...  # type: ignore
class DDPJoinStrategy(ours.DDPJoinStrategy, theirs.DDPStrategy): ...  # type: ignore
