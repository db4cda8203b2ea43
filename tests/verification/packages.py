"""Run `verify` on modules of public packages: without a defect, and with defects planted into them.

    pip install transformers peft x-transformers chemprop pytorch-forecasting neuralforecast darts timm lightly \
        segmentation-models-pytorch
    python -m tests.verification.packages  # all; names of modules and defects select some
    python -m tests.verification.packages --control  # with the comparisons switched off, which finds nothing

A defect is found if a finding names its line, which ends with `# here`. Times are those of a quiet machine only if
nothing else runs.
"""

import argparse
import inspect
import random
import resource
import sys
import time
import warnings

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ddp_ext.verification import ImpossibleError, relations, runs, verifier, verify

HIDDEN, NUMBER = 16, 24


# ---------------------------------------------------------------- inputs of a sample


def text(index):
    return torch.randint(3, 60, (12,), generator=torch.Generator().manual_seed(index))


def image(index):
    return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))


def sound(index):
    return torch.randn(1600, generator=torch.Generator().manual_seed(index))


def series(index):
    return torch.randn(24, 1, generator=torch.Generator().manual_seed(index)).cumsum(0)


def molecule(index):
    from chemprop.data import MoleculeDatapoint
    from chemprop.featurizers import SimpleMoleculeMolGraphFeaturizer

    names = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCC", "C1CCCCC1", "CCOC", "CN(C)C", "OCC(O)CO", "Cc1ccccc1"]
    point = MoleculeDatapoint.from_smi(names[index % 10] + "C" * (index // 10))
    return SimpleMoleculeMolGraphFeaturizer()(point.mol)


class Samples(Dataset):
    """Inputs with a label in 0..3 and a target."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return NUMBER

    def __getitem__(self, index):
        label = (index * 7 + index // 3) % 4
        return self.make(index), label, float(label) - 1.3 + 0.1 * (index % 5)


def collate(samples):
    inputs, labels, targets = zip(*samples, strict=True)
    if not isinstance(inputs[0], torch.Tensor):
        from chemprop.data import BatchMolGraph

        inputs = BatchMolGraph(inputs)
    else:
        inputs = torch.stack(inputs)
    return inputs, torch.tensor(labels), torch.tensor(targets)


def make_loader(make, repeats=False):
    options = {"batch_sampler": Repeating()} if repeats else {"batch_size": 12}
    return DataLoader(Samples(make), collate_fn=collate, **options)


class Repeating(Sampler):
    """Gives every rank the same batches."""

    def __iter__(self):  # here
        return iter([[*range(12)], [*range(12, 24)]])

    def __len__(self):
        return 2


# ---------------------------------------------------------------- modules of packages, as encoders of samples


class Transformer(nn.Module):
    """A small model of the package transformers."""

    def __init__(self, kind, adapted=False, **options):
        super().__init__()
        import transformers

        sizes = {
            "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "vocab_size": 64, "pad_token_id": 0,
        }  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
        self.model = getattr(transformers, f"{kind}Model")(config)
        if adapted:
            import peft

            self.model = peft.get_peft_model(self.model, peft.LoraConfig(target_modules=["query", "value"], r=2))

    def forward(self, inputs):
        if inputs.dtype.is_floating_point and inputs.dim() == 3:
            inputs = inputs[..., 0]
        output = self.model(inputs)
        return output.last_hidden_state.flatten(2).mean(-1 if output.last_hidden_state.dim() == 4 else 1)


class Flat(nn.Module):
    """Flattens the output of a network, or picks it."""

    def __init__(self, network, pick=lambda output: output, prepare=lambda inputs: inputs):
        super().__init__()
        self.network, self.pick, self.prepare = network, pick, prepare

    def forward(self, inputs):
        return self.pick(self.network(self.prepare(inputs))).flatten(1)


class Molecules(nn.Module):
    """Message passing of chemprop."""

    def __init__(self, kind="BondMessagePassing", aggregation="MeanAggregation"):
        super().__init__()
        import chemprop

        self.messages = getattr(chemprop.nn, kind)(d_h=HIDDEN, depth=2)
        self.aggregation = getattr(chemprop.nn, aggregation)(
            **({"output_size": HIDDEN} if "Att" in aggregation else {})
        )

    def forward(self, graphs):
        graphs.V, graphs.E = (one.to(next(self.parameters()).dtype) for one in (graphs.V, graphs.E))
        return self.aggregation(self.messages(graphs), graphs.batch)


def bert(**options):
    return Transformer("Bert", **options)


def wav2vec():
    return Transformer("Wav2Vec2", conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
                       num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
                       feat_extract_norm="layer")  # fmt: skip


def x_transformer(**options):
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=HIDDEN, depth=2, heads=2, **options)
    network = TransformerWrapper(num_tokens=64, max_seq_len=12, attn_layers=layers)
    return Flat(network, lambda output: output.mean(1))


def forecasting(kind="LSTM"):
    """Return a part of pytorch-forecasting."""
    if kind == "LSTM":
        from pytorch_forecasting.models.nn import LSTM

        return Flat(LSTM(1, HIDDEN, batch_first=True), lambda output: output[0][:, -1])
    if kind == "GRN":
        from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import GatedResidualNetwork

        return Flat(GatedResidualNetwork(24, HIDDEN, HIDDEN), prepare=lambda inputs: inputs[..., 0])
    from pytorch_forecasting.models.nbeats.sub_modules import NBEATSGenericBlock

    block = NBEATSGenericBlock(units=HIDDEN, thetas_dim=4, backcast_length=24, forecast_length=4)
    return Flat(block, lambda output: output[0] + output[1].sum(1, keepdim=True), lambda inputs: inputs[..., 0])


def neural_forecast(kind="NHITS"):
    import neuralforecast.models as models

    options = {"input_size": 24, "h": 4, "max_steps": 1, "alias": None}
    own = {"NHITS": {"mlp_units": 3 * [[16, 16]]}, "TCN": {}, "NBEATS": {"mlp_units": 3 * [[16, 16]]}}.get(kind, {})
    network = getattr(models, kind)(**options, **own)
    windows = {"hist_exog": None, "futr_exog": None, "stat_exog": None}

    def prepare(inputs):
        return {"insample_y": inputs, "insample_mask": torch.ones_like(inputs), **windows}

    inner = nn.Module()
    inner.forward, inner.blocks = network.forward, network
    return Flat(inner, prepare=prepare)


def darts(kind="DLinear"):
    if kind == "TCN":
        from darts.models.forecasting.tcn_model import _TCNModule as Network

        network = Network(
            input_size=1, kernel_size=3, num_filters=4, num_layers=2, dilation_base=2, weight_norm=False, target_size=1,
            nr_params=1, target_length=4, dropout=0.0, input_chunk_length=24, output_chunk_length=4,
            output_chunk_shift=0,
        )  # fmt: skip
    else:
        from darts.models.forecasting.dlinear import _DLinearModule as Network

        network = Network(
            input_dim=1, output_dim=1, future_cov_dim=0, static_cov_dim=0, nr_params=1, shared_weights=False,
            kernel_size=5, const_init=False, input_chunk_length=24, output_chunk_length=4, output_chunk_shift=0,
        )  # fmt: skip
    from darts.utils.data.torch_datasets.utils import PLModuleInput

    inner = nn.Module()
    inner.blocks, inner.forward = network, network.forward
    return Flat(inner, lambda output: output.prediction, lambda inputs: PLModuleInput(past_target=inputs))


def timm(name, **options):
    import timm as package

    return package.create_model(name, num_classes=HIDDEN, **options)


def segmentation(kind="Unet", **options):
    import segmentation_models_pytorch as package

    network = getattr(package, kind)("resnet18", encoder_weights=None, classes=4, **options)
    return Flat(network, lambda output: output.mean(3))


def lightly(kind="SimCLRProjectionHead", *sizes):
    from lightly.models.modules import heads

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(backbone, getattr(heads, kind)(*(sizes or (32, 16, HIDDEN))))


PLANTED = {
    "bert": (bert, text),
    "gpt2": (lambda: Transformer("GPT2", n_embd=HIDDEN, n_head=2, n_layer=2), text),
    "wav2vec2": (wav2vec, sound),
    "peft": (lambda: bert(adapted=True), text),
    "x-transformers": (x_transformer, text),
    "chemprop": (Molecules, molecule),
    "pytorch-forecasting": (forecasting, series),
    "neuralforecast": (neural_forecast, series),
    "darts": (darts, series),
    "timm": (lambda: timm("resnet10t"), image),
    "segmentation": (segmentation, image),
    "lightly": (lightly, image),
}

HEALTHY = {
    **PLANTED,
    **{
        kind: (lambda kind=kind, options=options: Transformer(kind, **options), text)
        for kind, options in {
            "Roberta": {"max_position_embeddings": 32},
            "DistilBert": {"dim": HIDDEN, "n_heads": 2, "n_layers": 2, "hidden_dim": 32},
            "Albert": {"embedding_size": 8}, "Electra": {"embedding_size": 8},
            "OPT": {"ffn_dim": 32, "word_embed_proj_dim": HIDDEN}, "Llama": {"num_key_value_heads": 2},
            "Mistral": {"num_key_value_heads": 2}, "GPTNeoX": {}, "Qwen2": {"num_key_value_heads": 2},
            "MPNet": {}, "RoFormer": {"embedding_size": HIDDEN},
            "Nystromformer": {"segment_means_seq_len": 12, "num_landmarks": 4},
        }.items()
    },
    **{
        kind: (lambda kind=kind, options=options: Transformer(kind, image_size=32, patch_size=8, **options), image)
        for kind, options in {"ViT": {}, "DeiT": {}, "Dinov2": {}, "Beit": {}}.items()
    },
    "x-transformers rotary": (lambda: x_transformer(rotary_pos_emb=True, ff_glu=True), text),
    "x-transformers rms": (lambda: x_transformer(use_rmsnorm=True, attn_qk_norm=True), text),
    "chemprop atoms": (lambda: Molecules("AtomMessagePassing", "SumAggregation"), molecule),
    "chemprop attention": (lambda: Molecules("BondMessagePassing", "AttentiveAggregation"), molecule),
    "pytorch-forecasting GRN": (lambda: forecasting("GRN"), series),
    "pytorch-forecasting N-BEATS": (lambda: forecasting("NBEATS"), series),
    "neuralforecast N-BEATS": (lambda: neural_forecast("NBEATS"), series),
    "neuralforecast DLinear": (lambda: neural_forecast("DLinear"), series),
    "neuralforecast TiDE": (lambda: neural_forecast("TiDE"), series),
    "timm vit": (lambda: timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2), image),
    "timm mixer": (lambda: timm("resmlp_12_224", img_size=32), image),
    "timm convnext": (lambda: timm("convnext_atto", depths=(1, 1, 1, 1)), image),
    "darts TCN": (lambda: darts("TCN"), series),
    "segmentation FPN": (lambda: segmentation("FPN", decoder_dropout=0.0), image),
    "lightly BYOL": (lambda: lightly("BYOLProjectionHead"), image),
    "lightly DINO": (lambda: lightly("DINOProjectionHead", 32, 16, 8, HIDDEN), image),
    "lightly MoCo": (lambda: lightly("MoCoProjectionHead"), image),
}  # fmt: skip


# ---------------------------------------------------------------- planted defects


class Wrapped(LightningModule):
    """Predicts the target of a sample from the features of an encoder."""

    average = 0.0

    def __init__(self, make, defect=None):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.defect = make(), nn.LazyLinear(1), defect
        self.gains = [1.0]

    def training_step(self, batch, batch_idx):
        inputs, labels, targets = batch
        hidden = self.encoder(inputs)
        change = FEATURES.get(self.defect)
        hidden = hidden if change is None else change(self, hidden)
        losses = (self.head(hidden)[:, 0] - targets).square()
        return LOSSES.get(self.defect, lambda *given: given[1].mean())(self, losses, labels, hidden)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam((one for one in self.parameters() if one.requires_grad), lr=1e-3)
        if self.defect != "monitored":
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss", "interval": "step"}]


def statistic(module, hidden):
    deviation = hidden.std()  # here
    return hidden / (deviation + 0.1)


def centred(module, hidden):
    return hidden - hidden.mean(0)  # here


def random_choice(module, hidden):
    if random.random() < 0.5:
        hidden = hidden * 1.5  # here
    return hidden


def state(module, hidden):
    shifted = hidden - module.average
    module.average = 0.5 * module.average + 0.5 * float(hidden.detach().abs().mean())  # here
    return shifted


def contrastive(module, losses, labels, hidden):
    unit = functional.normalize(hidden, dim=1)
    similarity = unit @ unit.T  # here
    return losses.mean() + similarity.logsumexp(1).mean()


def hardest(module, losses, labels, hidden):
    return losses.topk(len(losses) // 2).values.mean()  # here


def masked(module, losses, labels, hidden):
    mask = labels > 0
    return (losses * mask).sum() / mask.sum()  # here


def summed(module, losses, labels, hidden):
    return losses.sum()  # here


def root(module, losses, labels, hidden):
    return losses.mean().sqrt()  # here


def divided(module, losses, labels, hidden):
    return losses.mean() / module.trainer.world_size  # here


def monitored(module, losses, labels, hidden):
    module.log("loss", losses.mean())  # here
    return losses.mean()


FEATURES = {one.__name__: one for one in (statistic, centred, random_choice, state)}
LOSSES = {one.__name__: one for one in (contrastive, hardest, masked, summed, root, divided, monitored)}
DEFECTS = {**FEATURES, **LOSSES, "repeating": Repeating}
PER_MODULE = 6


def line_of(defect):
    lines, start = inspect.getsourcelines(DEFECTS[defect])
    (number,) = [start + place for place, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{__file__.rpartition('/')[2]}:{number}"


def build(make, sample, defect):
    module = Wrapped(make, defect)
    data = make_loader(sample, repeats=defect == "repeating")
    with torch.no_grad():
        module.head(module.encoder(next(iter(data))[0]))  # sizes of the head
    return module, data


def switch_comparisons_off():
    """Let all numbers, operations, samples and states be equal to the ones they are compared with."""
    relations.relative_difference = verifier.relative_difference = lambda *_: 0.0
    verifier.compare_steps = runs.find_difference = lambda *_: None
    verifier._check_logged = lambda *_: ()
    verifier.walk = lambda *_: ()


def processor_seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="modules, defects, or module:defect; `healthy` for no defect")
    parser.add_argument("--control", action="store_true", help="only defects, with all comparisons switched off")
    options = parser.parse_args()
    names = options.names
    if options.control:
        switch_comparisons_off()
    warnings.simplefilter("ignore")
    chosen = [] if options.control else [(name, None) for name in HEALTHY]
    for place, name in enumerate(PLANTED):
        chosen += [(name, [*DEFECTS][(place + step) % len(DEFECTS)]) for step in range(PER_MODULE)]
    wrong, counts = [], {"healthy": 0, "planted": 0, "found": 0, "with line": 0, "silent": 0}
    for name, defect in chosen:
        if names and not {name, defect or "healthy", f"{name}:{defect or 'healthy'}"} & {*names}:
            continue
        started, used = time.monotonic(), processor_seconds()
        try:
            report = verify(*build(*HEALTHY[name], defect), limit=200)
            findings = [(one.name, one.text, one.where, one.remedy) for one in report.findings]
            notes = [one.name for one in report.checks if one.verdict == "note"]
        except ImpossibleError as error:
            findings, notes = [("impossible", str(error), "", "")], []
        counts["healthy" if defect is None else "planted"] += 1
        if defect is None:
            is_right = not findings
            counts["silent"] += is_right
        else:
            counts["found"] += bool(findings) and findings[0][0] != "impossible"
            has_line = any(line_of(defect) in one[2] for one in findings)
            counts["with line"] += has_line
            is_right = not findings if options.control else has_line
        if not is_right:
            wrong.append((name, defect))
        shown = "" if is_right else f"  {findings} {notes}"
        seconds = f"{time.monotonic() - started:6.1f} s ({processor_seconds() - used:.1f} s of a processor)"
        print(f"{seconds}  {name}, {defect or 'healthy'}: {is_right}{shown}", flush=True)
    print(counts, "wrong:", wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
