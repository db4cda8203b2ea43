"""The rows of the table: each trains as one process on the batches of all ranks, or is refused."""

import functools
import importlib.util
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import callbacks, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import ClassWeights, TokenCount
from lightning_ddp_ext.callbacks import ReplicaConsistency
from tests.parity import models
from tests.parity.columns import COLUMNS, POOL, UNEVEN, Column, Row, Run, pairs
from tests.parity.models import CHANGES, CLASS_WEIGHTS, Language, Layers, texts
from tests.strategies.toolkit import RANK, Adversaries, Classifier, Fused, Polyak
from tests.support.training import CachesMask, normalised_network

TRAINER = ("balanced_dp", "balanced_ddp", "ddp_join", "ddp_checkpoint")
OF_RANKS = TRAINER[1:]
OWN = TRAINER[2:]  # every rank has batches of its own
JOIN_3 = ("ddp_join on 3 ranks",)
FABRIC = ("fabric balanced_ddp", "fabric ddp_join", "fabric ddp_checkpoint")

Momentum = partial(Classifier, torch.optim.SGD, lr=0.1, momentum=0.9)
Summed = partial(Momentum, is_sum=True)
LBFGS = partial(Classifier, torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


def step(compute: Any, sizes: Any = UNEVEN, parts: Any = None, **options: Any) -> Row:
    return Row(partial(models.Step, compute, **(parts or {})), sizes, **options)


def layer() -> nn.Module:
    return nn.Linear(5, 3)


def normalised_over_ranks() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), models.SynchronizedNorm(4), nn.Tanh(), nn.Linear(4, 3))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


EXTRA = {"extra": layer, "unused": layer}


def negative_weight(batch: Any) -> float:
    return -1.0


def skips(sizes: Any, model: Any = models.Skipping, columns: Any = OWN, **options: Any) -> Row:
    return Row(model, sizes, skipped=7, columns=columns, **options)


def drawn(indices: list[Any], drops: bool = False, collate_fn: Any = models.collate) -> DataLoader:
    """Load samples by their numbers; with some that are damaged in every batch but the last, if it `drops` any."""
    batches = [one.tolist() for one in indices]
    more = [[*batch, *[-1] * (1 + RANK)] for batch in batches[:-1]] if drops else batches[:-1]
    return DataLoader(Damaged(), batch_sampler=[*more, batches[-1]], collate_fn=collate_fn)


class Damaged(Dataset):
    """The samples of the table; the last one is damaged."""

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index] for part in POOL), index < 0


def transposed(loader: Any, **options: Any) -> Row:
    def ready(indices: Tensor) -> Any:
        return models.collate([Damaged()[index] for index in indices.tolist()])

    return Row(
        models.Transposed, ((6, 5, 3, 2), (2, 1, 1)), loader=loader, data=ready, columns=OWN, validates=True, **options
    )


KEPT = ("_set_params_and_buffers_to_ignore_for_model(module, ['counts'])", 1)


def counts(*args: Any, warns: Any = ("", 0), **options: Any) -> Row:
    return Row(partial(models.Counting, *args, **options), columns=OWN, warns=warns)


def weigh_unless_skipped(batch: Any) -> float:
    """Give batches no weight whose loss has gradients, unlike the loss of a step that has returned None."""
    return float(len(batch[1]) % 7)


def scaling() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


EXACT = {
    "momentum": Row(Momentum, validates=True),
    "Adam": Row(Classifier),
    "stream": Row(Momentum, is_stream=True, validates=True),
    "three ranks": Row(Momentum, validates=True, columns=JOIN_3),
    "three ranks, stream, accumulated": Row(Momentum, windows=2, is_stream=True, columns=JOIN_3),
    "three ranks, recomputed layers": Row(partial(Layers, partial(models.Transformer, True)), columns=JOIN_3),
    "clipped by norm": Row(Momentum, trainer={"gradient_clip_val": 0.05}),
    "clipped by value": Row(Momentum, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated over 2": Row(Momentum, windows=2, validates=True),
    "accumulated over 3, clipped": Row(Momentum, windows=3, trainer={"gradient_clip_val": 0.05}),
    "accumulated stream": Row(Momentum, windows=2, is_stream=True, columns=TRAINER),
    "fewer batches than announced": Row(Momentum, missing=3, validates=True, columns=("ddp_join", "fabric ddp_join")),
    "fewer batches than announced, accumulated": Row(Momentum, windows=2, missing=3, columns=JOIN_3),
    "fewer batches, limited": Row(Momentum, missing=2, trainer={"limit_train_batches": 3}, columns=JOIN_3),
    "sum": Row(Summed, weight_by="sum"),
    "sum, accumulated": Row(Summed, weight_by="sum", windows=2),
    "scheduled": Row(models.Scheduled),
    "accumulated, scheduled": Row(models.Scheduled, windows=2),
    "parameter containers": Row(partial(Layers, models.with_containers)),
    "parametrized": Row(partial(Layers, models.parametrized)),
    "hooked norms": Row(partial(Layers, models.hooked_norms), columns=TRAINER),
    "complex weights": Row(partial(Layers, models.Complex), lacking="complex tensors"),
    "adapters": Row(partial(Layers, lambda: nn.Sequential(models.LowRank(nn.Linear(5, 3)), nn.Tanh()))),
    "tied weights": Row(partial(Layers, models.tied)),
    "frozen normalisation": Row(partial(Layers, lambda: nn.Sequential(nn.Linear(5, 3), models.FrozenNorm(3).eval()))),
    "transformer": Row(partial(Layers, partial(models.Transformer, None))),
    "recomputed layers": Row(partial(Layers, partial(models.Transformer, False))),
    "recomputed layers, reentrant": Row(partial(Layers, partial(models.Transformer, True)), windows=2),
    "moving mean": Row(partial(Layers, models.Moving)),
    "gradients of samples": step(models.derivatives),
    "penalty on a slope": step(models.penalised, parts={"critic": critic}),
    "adversarial inputs": step(models.adversarial),
    "partly used": step(models.partly_used, parts=EXTRA),
    "partly used, accumulated": step(models.partly_used, parts=EXTRA, windows=2),
    "thawed": Row(models.Thawing, columns=TRAINER),
    "evaluation mode": step(models.in_evaluation_mode, parts={"network": normalised_network}),
    "caches of the size of a batch": Row(partial(CachesMask, torch.optim.SGD, lr=0.1), data=pairs, columns=TRAINER),
    "another precision": Row(partial(Layers, lambda: nn.Linear(5, 3).double()), trainer={"precision": "32-true"},
                             columns=TRAINER),
    "optimizer inside of the backward pass": Row(partial(Classifier, Fused), columns=OWN),
    "optimizer inside, made early": Row(models.FusedEarly, windows=2, columns=OWN,
                                        lacking="parameters that stay the same objects when they are moved"),
    "an empty batch": Row(Momentum, [[3, 4], [2, 0]], columns=(*OWN, *FABRIC)),
    "a rank without data": Row(Momentum, [[], [5, 4], [2]], columns=("ddp_join", "fabric ddp_join"), wrong=None),
    "a rank without data, accumulated": Row(Momentum, [[2, 3], [], [2]], windows=3, columns=JOIN_3),
    "one rank with data": Row(Momentum, [[], [], [3, 2, 4]], is_stream=True, columns=JOIN_3, wrong=None),
    "tokens by a callable": step(models.of_tokens, weight_by=models.count_tokens, wrong="samples"),
    "tokens by a callable, windows": step(models.of_tokens, weight_by=models.count_tokens, wrong="samples", windows=3,
                                             columns=OF_RANKS),
    "language": Row(Language, data=texts, weight_by="tokens", wrong="samples"),
    "language, accumulated": Row(Language, data=texts, weight_by=TokenCount(shift=True), wrong="samples", windows=3,
                                 columns=OF_RANKS),
    "packed": Row(Language, data=partial(texts, packed=True), weight_by="tokens", wrong="equal", windows=2,
                  columns=OWN),
    "class weights": Row(partial(Language, CLASS_WEIGHTS), data=texts, wrong="tokens",
                         weight_by=ClassWeights(CLASS_WEIGHTS, labels=models.counted_classes)),
    "sparse gradients": Row(partial(Language, sparse=True), data=texts, weight_by="tokens", wrong="samples",
                            lacking="sparse tensors",
                            columns=OF_RANKS),
    "L-BFGS": Row(LBFGS, tolerance=1e-6),
    "steps by the loss": Row(partial(Classifier, Polyak)),
    "steps by a sum": Row(partial(Classifier, Polyak, is_sum=True), weight_by="sum", wrong="samples"),
    "two sums": Row(models.ManualSums, weight_by="sum", columns=OF_RANKS),
    "two optimizers": Row(Adversaries, columns=OF_RANKS),
    "two optimizers, accumulated by hand": Row(partial(Adversaries, toggle=False, accumulate=True), columns=OF_RANKS),
    "two optimizers of torch": Row(models.ByTorch, columns=OF_RANKS),
    "a probe, accumulated": Row(models.WithProbe, windows=2, columns=OWN),
    "two tasks, recomputed": Row(partial(models.TwoTasks, False), columns=(*OF_RANKS, *FABRIC)),
    "two tasks, recomputed, reentrant": Row(partial(models.TwoTasks, True), columns=OF_RANKS),
    "a manual step": Row(models.Manual, columns=(*OF_RANKS, *FABRIC)),
    "a manual step with its own rate": Row(partial(models.Manual, lr=lambda number: 0.1 / (1 + number)),
                                           columns=OF_RANKS),
    "lists in the state": Row(partial(models.Manual, models.WithHistory), columns=OF_RANKS),
    # Their closures communicate for the loss of all ranks, for which one rank warns.
    "by the loss, manually": Row(partial(models.SteppingByTheLoss, False), columns=OF_RANKS, warns=None),
    "by the loss, with torch's optimizer": Row(partial(models.SteppingByTheLoss, True), columns=OF_RANKS, warns=None),
    "twins": step(models.twins, weight_by="equal", wrong="sum", columns=OWN),
    "all pairs": step(models.all_pairs, lacking="all_to_all", weight_by="equal", wrong="sum", columns=OWN),
    "all pairs by samples": step(models.all_pairs, lacking="all_to_all", wrong="sum", columns=OWN),
    "own pairs": step(models.own_pairs, lacking="all_to_all", weight_by="sum", wrong="samples", columns=OWN),
    "skipped": skips([[3, 7, 2, 7], [1, 7, 4, 7]]),
    "skipped, the first batch": skips([[7, 3], [7, 2]]),
    "skipped, accumulated": skips([[3, 7, 7, 2, 7, 7, 3], [1, 2, 7, 4, 7, 7, 7]], windows=2),
    "skipped, sums": skips([[3, 7, 2, 7], [1, 2, 7, 7]], partial(models.Skipping, is_sum=True), weight_by="sum"),
    "skipped, equal weights": skips([[4, 7, 4], [4, 4, 4]], weight_by="equal", wrong=None),
    "skipped, clipped": skips([[3, 7, 7], [1, 2, 7]], trainer={"gradient_clip_val": 0.05}),
    "skipped, scaled": skips([[3, 7, 2, 7], [1, 2, 7, 7]], models.Scaled, trainer=scaling),
    "skipped, a rank without data": skips([[3, 7, 2, 7, 7, 4], [1, 2, 7]], columns=("ddp_join",)),
    "skipped, optimizer inside": skips([[7, 3, 7, 2], [1, 7, 4, 7]], partial(Classifier, Fused), windows=2,
                                       weight_by=weigh_unless_skipped),
    "drawn": transposed(drawn),
    "ready, with `batch_dim`": transposed(None, options={"batch_dim": 1}),
    "dropped by the collate function": transposed(
        partial(drawn, drops=True), options={"batch_dim": 1}, warns=("the loader has drawn", 2)
    ),
    "dropped from a list": transposed(
        partial(drawn, drops=True, collate_fn=models.listed), warns=("the loader has drawn", 2)
    ),
    "asked for the number of steps": Row(models.Estimating, columns=OF_RANKS),
    "counts": counts("on_train_batch_end"),
    "counts before the optimizer": counts("on_before_optimizer_step"),
    "counts, manually": counts("on_train_batch_end", automatic=False),
    "counts, accumulated": Row(partial(models.Counting, "on_before_optimizer_step"), windows=2, columns=OWN,
                               sizes=((2, 1, 3, 2), (1, 1, 2, 4))),
    "counts, compared": Row(partial(models.Counting, "on_train_batch_end"), columns=OWN,
                            trainer=lambda: {"callbacks": [ReplicaConsistency(every_n_steps=1)]}),
    "counts that are kept": counts("", resets=False, warns=KEPT),
    "counts that are kept from the second epoch": counts("", resets=False, first_epoch=1, warns=KEPT),
    "metrics that communicate": Row(models.Communicating, columns=OWN),
    "twins of equal batches": step(models.twins, ((3, 3), (3, 3)), wrong=None, is_exact=False, columns=OWN),
    "twins by samples": step(models.twins, wrong="sum", columns=OWN),
    "twins, manually": Row(partial(models.Manual, compute=models.twins), wrong=None, is_exact=False, columns=OWN,
                           warns=("communicates between ranks", 1)),
    "twins, manually, with equal weights": Row(partial(models.Manual, compute=models.twins), weight_by="equal",
                                               wrong="sum", columns=OWN),
    # Under Fabric, ranks without data would normalise copies too.
    "normalised over ranks": Row(partial(Layers, normalised_over_ranks), wrong="equal",
                                 columns=(*OF_RANKS, "fabric balanced_ddp", "fabric ddp_checkpoint")),
    "coupled": step(models.coupled, weight_by="equal", wrong=None, lacking="all_to_all",
                    columns=(*OWN, "balanced_ddp")),
    "the first rank without samples": Row(Momentum, options={"split": None, "gpu0_batch_size": 0}, wrong=None,
                                          columns=("balanced_dp", "balanced_ddp", "fabric balanced_ddp")),
    "shares accumulated without samples": Row(Momentum, options={"split": None, "gpu0_batch_size": 0}, wrong=None,
                                              windows=2, columns=("balanced_ddp", "fabric balanced_ddp")),
    "even shares": Row(Momentum, options={"split": None, "balance": "even"},
                       columns=("balanced_dp", "balanced_ddp", "fabric balanced_ddp")),
    "learnt shares": Row(Adversaries, options={"split": None}, wrong=None, columns=("balanced_ddp",)),
    "validated within an epoch": Row(Momentum, trainer={"val_check_interval": 2}, validates=True, columns=OF_RANKS),
    "recomputed by the strategy": Row(partial(Layers, models.tied), columns=OF_RANKS,
                                      options={"activation_checkpointing": "torch.nn.Linear"}),
    **{change.__name__: Row(partial(models.Changing, change), columns=OF_RANKS) for change in CHANGES},
}  # fmt: skip

if importlib.util.find_spec("transformers"):  # which environments of other versions lack
    EXACT["GPT-2"] = Row(
        models.Gpt2, data=texts, weight_by="tokens", wrong="samples", tolerance=1e-6, columns=("balanced_dp",)
    )

EVEN = [[4] * 4] * 3


def post_local_sgd() -> dict[str, Any]:
    state, hook = post_localSGD_hook.PostLocalSGDState(None, None, 100), post_localSGD_hook.post_localSGD_hook
    return {"ddp_comm_state": state, "ddp_comm_hook": hook, "model_averaging_period": 2}


def identical(model: Any = models.Normalised, columns: Any = OF_RANKS, **options: Any) -> Row:
    return Row(model, ((4, 5, 6, 3), (2, 4, 3, 2)), columns=columns, is_exact=False, wrong=None, epochs=3, **options)


IDENTICAL = {
    "dropout": identical(),
    "random numbers of ranks": identical(models.Drawing),
    "early stopping": identical(trainer=lambda: {"callbacks": [EarlyStopping("val_loss_epoch")]}, validates=True),
    "averaged weights": identical(
        trainer=lambda: {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]}, columns=OWN
    ),
    "accumulation schedule": identical(
        trainer=lambda: {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})]}
    ),
    "bf16-mixed": identical(trainer={"precision": "bf16-mixed"}),
    "bf16-true": identical(trainer={"precision": "bf16-true"}),
    "post-local SGD": identical(columns=("ddp_checkpoint",), options=post_local_sgd()),
    "compressed gradients": identical(
        options={"ddp_comm_hook": default_hooks.allreduce_hook,
                 "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}
    ),
}  # fmt: skip

if hasattr(callbacks, "EMAWeightAveraging"):  # Lightning 2.6
    IDENTICAL["moving averages"] = identical(
        trainer=lambda: {"callbacks": [callbacks.EMAWeightAveraging()]}, columns=OWN
    )

BY_HAND = "rank {}: `Adam` is about to step"
FEWER = " optimizer steps, others "
JOINED = [[4] * 4, [4] * 4, [4]]  # the third rank runs out of batches
RATE = "setting `lr` of parameter group 0 of optimizer 0 (SGD) is "


def refused(model: Any, text: str, sizes: Any = EVEN, columns: Any = OWN, **options: Any) -> Row:
    return Row(model, sizes, refused=text, columns=columns, wrong=None, **options)


def differs(hook: str, change: Any, text: str, **options: Any) -> Row:
    return refused(partial(models.Differing, hook, change), f"ranks are not set up alike: {text}", **options)


REFUSED = {
    "raw backward": refused(models.RawBackward, BY_HAND),
    "gradients set by hand": refused(models.ByHandAlone, BY_HAND),
    "steps of one rank": refused(models.SteppingAlone, "RanksOutOfStepError: rank {} has made"),
    "steps of one rank in the uneven phase": refused(partial(models.SteppingAlone, after=4), FEWER, JOINED, JOIN_3),
    "steps of one rank in the last batch": refused(partial(models.SteppingAlone, after=6), FEWER, JOINED, JOIN_3,
                                                   epochs=1),
    "steps of other optimizers": refused(
        partial(models.SteppingAlone, steps_first=True), "as many as others, but not with the same optimizers"
    ),
    "a parameter that came later": refused(
        models.GrownHead, BY_HAND + " with the gradient of `head.weight`, which was not part"
    ),
    "a trained tensor that is no parameter": refused(
        models.PlainTensor, "rank {}: `SGD` is about to step with the gradient of a parameter of shape [2], which was"
    ),
    "negative weight": refused(Classifier, "ValueError: `weight_by` returned -1.0", weight_by=negative_weight),
    "uneven passes": refused(partial(models.ManualSums, True), "rank {} synchronises gradients at batch",
                             columns=("ddp_checkpoint",)),
    "torch's optimizer inside of the backward pass": refused(
        models.InBackward, "UnsupportedFeatureError: parameter `network.0.weight` is changed inside of the backward"
    ),
    "different modules": refused(models.DifferentSize, "`network.2.weight` is"),
    "different arguments": refused(Classifier, "argument `bucket_cap_mb` is 5 on rank 0 but 6 on rank 1",
                                   options={"bucket_cap_mb": 5 + RANK}),
    "rate by a value of a rank": refused(models.Monitoring, RATE + "0.1 on rank 0 but 0.01", epochs=3),
    "rate by a number of a rank": differs(
        "on_train_batch_end", lambda module, optimizer: optimizer.param_groups[0].update(lr=0.1 / (1 + RANK)),
        RATE + "0.1 on rank 0 but 0.05",
    ),
    "manual rate": refused(partial(models.Manual, lr=lambda number: 0.1 * (1 + RANK * (number > 1))),
                           "ranks are not set up alike: " + RATE + "0.1 on rank 0 but 0.2",
                           columns=(*OWN, "fabric ddp_join", "fabric ddp_checkpoint")),
    "groups of parameters": differs("on_train_batch_end", models.adds_a_group,
                                    "number of parameter groups of optimizer 0 (SGD) is 1 on rank 0 but 2 on rank 1"),
    "last batch": differs("on_train_batch_end", models.decays_last,
                          "setting `weight_decay` of parameter group 0 of optimizer 0 (SGD) is 0.0 on rank 0 but 0.1"),
    "an array of numpy": differs(
        "on_train_batch_start",
        lambda module, optimizer: optimizer.param_groups[0].update(w=np.array([0.5, 0.25 * (1 + RANK)])),
        "setting `w` of parameter group 0 of optimizer 0 (SGD) is [0.5, 0.25] on rank 0 but [0.5, ",
    ),
    "other parameters": refused(models.OtherLayers, "parameter `layers.0.weight` of parameter group 0 of optimizer 0"),
}  # fmt: skip


def draw(seed: int) -> Row:
    """Draw amounts of data for three ranks."""
    draws = random.Random(seed)
    counts = [draws.choice([0, draws.randint(1, 6)]) for _ in range(3)]
    sizes = [[draws.randint(1, 4) for _ in range(count)] for count in [max(1, counts[0]), *counts[1:]]]
    return Row(Momentum, sizes, windows=draws.randint(1, 4), is_stream=draws.random() < 0.5, wrong=None,
               trainer={"gradient_clip_val": draws.choice([None, 0.3])}, columns=JOIN_3)  # fmt: skip


DRAWN = {f"drawn {seed}": draw(seed) for seed in range(8)}
ROWS = {**EXACT, **IDENTICAL, **REFUSED, **DRAWN}


def train_row(column: str, name: str, is_wrong: bool = False, folder: str = "") -> Run:
    """Train a row under a column on this rank."""
    return with_dtype_kept(COLUMNS[column].train, ROWS[name], is_wrong)


def train_alone(column: str, name: str) -> Run:
    """Train a row in one process on the batches of all ranks, once for all columns with the same batches."""
    ranks = COLUMNS[column].ranks or (2 if ROWS[name].windows == 1 else 0)
    return train_once(Column(object, ranks, COLUMNS[column].is_even), name)


@functools.cache
def train_once(batches: Column, name: str) -> Run:
    return with_dtype_kept(batches.alone, ROWS[name])


def with_dtype_kept(train: Callable[..., Run], row: Row, *args: Any) -> Run:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seed_everything(0, verbose=False)
        dtype = torch.get_default_dtype()
        try:
            run = train(row, *args)
            run.warned = [str(one.message) for one in caught]
            return run
        finally:
            torch.set_default_dtype(dtype)
