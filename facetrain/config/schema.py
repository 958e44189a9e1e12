"""Every key that a run description may have, with its bounds and its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
BackboneName = Literal[
    "r18", "r34", "r50", "r100", "r200", "r2060",
    "mbf_small", "mbf", "mbf_large",
    "vit_t", "vit_s", "vit_b", "vit_l", "vit_h",
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    "iresnet",
]  # fmt: skip


class Section(BaseModel):
    """A part of a run description: unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
    )


class RunConfig(Section):
    """Where a run keeps what it makes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """The run's folder is `dir/name`."""
    dir: str = "runs"
    """The folder of all runs."""


class AugmentConfig(Section):
    """How likely an image is changed in which way, each drawn for itself."""

    flip: Probability = 0.5
    """Mirror left and right."""
    low_resolution: Probability = 0.0
    """Shrink to 50–80 % and back."""
    blur: Probability = 0.0
    """Gaussian blur."""
    gray: Probability = 0.0
    """Take the color away."""
    color: Probability = 0.0
    """Change brightness, contrast and saturation."""
    crop: Probability = 0.0
    """Cut out a part and enlarge it."""
    erase: Probability = 0.0
    """Cover a rectangle."""
    jpeg: Probability = 0.0
    """Save at a low quality and open again."""


class SyntheticConfig(Section):
    """The dataset of people who do not exist, drawn where `data.train` is not there yet."""

    identities: Positive = 400
    """People to train on."""
    images_per_identity: Positive = 20
    """Images of each of them."""
    eval_identities: Annotated[int, Field(ge=2)] = 100
    """Further people, whom training never sees, for the verification set."""
    eval_pairs: Annotated[int, Field(ge=20, multiple_of=20)] = 1000
    """Pairs in the verification set, half of them of the same person."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Another seed draws other people."""


class DataConfig(Section):
    """What is learned from."""

    train: str
    """A folder with train.rec, one folder per identity, tar or Parquet shards; a list file; or a mixture's YAML."""
    image_size: Annotated[int, Field(ge=16, le=1024)] = 112
    """Width and height in pixels that the network sees."""
    num_classes: Positive | None = None
    """Read from the data; if given, it must agree."""
    num_images: Positive | None = None
    """Read from the data; if given, it must agree."""
    min_images_per_identity: Positive = 1
    """Leave out identities with fewer images."""
    workers: NotNegative | Literal["auto"] = "auto"
    """Processes that read and decode, on each rank; auto takes the cores that the rank has; 0 reads in between."""
    shuffle: Literal["full", "blocks"] = "full"
    """full: any image may follow any other. blocks: for slow disks, read in stretches, shuffle within a window."""
    bad_records: Literal["error", "skip"] = "error"
    """What to do with an image that cannot be decoded."""
    decode: Literal["cpu", "gpu", "dali"] = "cpu"
    """gpu: nvJPEG decodes, on CUDA; its pixels differ by rounding. dali: NVIDIA DALI does, where it is installed."""
    max_skipped: NotNegative | None = None
    """With bad_records skip: stop when all ranks together have skipped more images."""
    augment: AugmentConfig = AugmentConfig()
    synthetic: SyntheticConfig | None = None


class ModelConfig(Section):
    """The network that turns a face into an embedding."""

    backbone: BackboneName = "r50"
    """r18 r34 r50 r100 r200, mbf_small mbf mbf_large, vit_t …, torchvision's resnet18 …, or iresnet with layers and
    widths."""
    embedding_size: Positive = 512
    """Length of an embedding."""
    layers: tuple[Positive, ...] | None = None
    """For iresnet: blocks in each stage."""
    widths: tuple[Positive, ...] | None = None
    """For iresnet: channels in each stage."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of features dropped before the last layer."""
    checkpoint_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third slower."""
    batch_norm: Literal["auto", "local", "sync"] = "auto"
    """Statistics of each rank, or of all; auto: of all where global_batch_size is given, so that the result does not
    depend on the number of ranks; of each where batch_size is, as the published recipes have it."""
    init_from: str | None = None
    """Weights to start from: a run's folder, a checkpoint, .safetensors, arcface_torch's .pt, MXNet's -symbol.json,
    or .onnx."""
    freeze: tuple[str, ...] = ()
    """Parameters whose name starts with one of these are not trained."""
    lr_factors: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Prefix of parameter names → factor on the learning rate."""

    @model_validator(mode="after")
    def _layers_and_widths_are_for_iresnet(self) -> Self:
        own = self.backbone == "iresnet"
        if own and (self.layers is None or self.widths is None):
            raise ValueError("backbone iresnet needs layers and widths, four numbers each")
        if own and not len(self.layers or ()) == len(self.widths or ()) == 4:
            raise ValueError("layers and widths are four numbers each")
        if not own and (self.layers or self.widths):
            raise ValueError(f"layers and widths are for backbone iresnet; {self.backbone} has its own")
        return self


class MarginConfig(Section):
    """What makes the softmax demand more than being right."""

    type: Literal[
        "arcface",
        "cosface",
        "combined",
        "softmax",
        "adaface",
        "magface",
        "curricularface",
        "elastic_arcface",
        "elastic_cosface",
    ] = "arcface"
    """arcface: cos(θ + m2). cosface: cos θ − m3. combined: cos(m1·θ + m2) − m3. softmax: no margin. adaface: by the
    image's quality, m2. magface: by the embedding's norm, `norms` and `margins`. curricularface: arcface with hard
    negatives that count more and more. elastic_arcface, elastic_cosface: m2 or m3 drawn anew for every image."""
    scale: Annotated[float, Field(gt=0)] = 64.0
    """s, by which cosines are multiplied."""
    m1: Annotated[float, Field(ge=1)] = 1.0
    """Multiplies the angle (SphereFace)."""
    m2: Annotated[float, Field(ge=0)] | None = None
    """Added to the angle, in radians; null: as published (0.5; adaface 0.4)."""
    m3: Annotated[float, Field(ge=0)] | None = None
    """Subtracted from the cosine; null: as published (cosface 0.4, elastic_cosface 0.35, combined 0)."""
    h: Annotated[float, Field(gt=0)] = 0.333
    """adaface: how widely qualities are spread over [-1, 1]."""
    average: Annotated[float, Field(gt=0, le=1)] = 0.01
    """adaface, curricularface: how far running averages move toward each batch."""
    sigma: Annotated[float, Field(ge=0)] = 0.0125
    """elastic_arcface, elastic_cosface: standard deviation of the margin."""
    norms: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (10.0, 110.0)
    """magface: the least and the greatest norm, between which the margin rises."""
    margins: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = (0.45, 0.8)
    """magface: the margins at these norms."""
    norm_weight: Annotated[float, Field(ge=0)] = 35.0
    """magface: weight of the regularizer that rewards long embeddings."""
    gradient: Literal["exact", "straight_through"] = "exact"
    """straight_through: arcface_torch's present code, which does not differentiate the margin."""
    beyond_pi: Literal["none", "linear"] = "linear"
    """Where θ + m2 > π: go on with cos(θ + m2), or with cos θ − m2·sin m2, as the paper's code does."""
    filter_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Negatives with a cosine above this are taken for label noise and count as 0; 0 switches it off."""

    @model_validator(mode="after")
    def _margins_belong_to_the_type(self) -> Self:
        if self.type == "cosface" and self.m3 == 0:
            raise ValueError("cosface needs m3 > 0 (0.4 in the published configs)")
        if self.type != "combined" and self.m1 != 1:
            raise ValueError(
                f"{self.type} does not multiply the angle: with m1 {self.m1:g}, take type combined"
            )
        if self.type == "curricularface" and self.filter_threshold:
            raise ValueError("filter_threshold and curricularface both change hard negatives; take one")
        if self.norms[0] >= self.norms[1]:
            raise ValueError("norms: the first must be below the second")
        return self


class HeadConfig(Section):
    """The class centers, split over the ranks."""

    init_from: Literal["reinit", "keep", "extend"] = "reinit"
    """With model.init_from. keep: its centers, of the same identities; extend: its centers, and new ones behind them
    for the identities that the dataset has more; reinit: all are drawn anew."""
    margin: MarginConfig = MarginConfig()
    loss: Literal["softmax", "unified"] = "softmax"
    """unified: one learned threshold parts own classes from others (UniFace; with margin cosface, m3 0.4)."""
    negative_weight: Annotated[float, Field(gt=0)] = 1.0
    """unified: weight of the other classes' part of the loss."""
    sub_centers: Positive = 1
    """Centers per identity, of which the nearest counts (Sub-center ArcFace, 3 there); each takes memory and time."""
    drop_sub_centers_epoch: Annotated[float, Field(ge=0)] | None = None
    """From this epoch on only the dominant sub-center counts, and images far from it are left out."""
    drop_angle: Annotated[float, Field(gt=0, le=180)] = 75.0
    """In degrees: images further than this from the dominant sub-center are taken for label noise."""
    sample_rate: Probability = 1.0
    """Share of the classes that take part in a step (Partial FC); 1: all; 0: only those in the batch."""
    sample_block: Positive | Literal["auto"] = "auto"
    """Consecutive classes that are drawn together; auto: 8 on disk, which reads them as one, else 1."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """How centers are stored."""
    momentum_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """How their momentum is stored; int8 in blocks of 128 with a scale each, for sgd."""
    placement: Literal["device", "host", "disk"] = "device"
    """Where centers and momentum live; only the sampled rows come to the device."""
    chunk_size: Positive | Literal["auto"] = "auto"
    """Classes whose logits exist at a time."""

    @model_validator(mode="after")
    def _sub_centers_are_there_to_be_dropped(self) -> Self:
        if self.drop_sub_centers_epoch is not None and self.sub_centers == 1:
            raise ValueError("drop_sub_centers_epoch needs sub_centers of 2 or more (3 as published)")
        return self


class OptimConfig(Section):
    """How weights move."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.1
    """The highest learning rate, for the whole global batch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Applies to every parameter and to the centers of a step's sample."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """Bound on the L2 norm of the backbone's gradient; null: none."""
    accumulate: Positive = 1
    """Micro-batches per step."""
    schedule: Literal["polynomial"] = "polynomial"
    power: Annotated[float, Field(gt=0)] = 2.0
    """Of the polynomial by which the rate falls to 0."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """May be a fraction."""


class TrainConfig(Section):
    """How long, how much at once, and with which numbers."""

    batch_size: Positive | None = None
    """Images per rank and micro-batch; 128 where neither this nor global_batch_size is given."""
    global_batch_size: Positive | None = None
    """Images per step, over all ranks and micro-batches."""
    epochs: Positive = 20
    max_steps: Positive | None = None
    """Stop here, whatever the epochs; the schedule ends here too."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of the backbone; the last layer and the loss are always computed in float32."""
    compile: bool = False
    """torch.compile on each block of the backbone while it trains; the code is kept for the next run."""
    channels_last: bool = True
    """Memory layout of images and activations."""
    compress_gradients: Literal["none", "fp16", "bf16"] = "none"
    """Send the backbone's gradients in 16 bits."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    keep_freed_memory: bool = True
    """On a CPU, keep freed blocks for the next step: faster, for up to twice the memory."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a rank waits for the others before it calls them lost."""
    max_skipped_steps: Positive = 10
    """Stop after so many steps in a row whose loss or gradient is not finite."""
    loss_spike: Annotated[float, Field(gt=0)] | None = None
    """Report steps whose loss lies so many deviations above the median of the last 128; 10 is a beginning."""

    @model_validator(mode="after")
    def _one_batch_size(self) -> Self:
        if self.batch_size and self.global_batch_size:
            raise ValueError("give batch_size (per rank) or global_batch_size (of all ranks), not both")
        return self


class EvalConfig(Section):
    """Verification while training."""

    targets: tuple[str, ...] = ("lfw", "cfp_fp", "agedb_30")
    """Names of .bin sets in `dir`, or paths."""
    dir: str | None = None
    """null: the folder of data.train."""
    every_steps: Positive = 2000
    batch_size: Positive = 256


class CheckpointConfig(Section):
    """What is saved, and when."""

    every_steps: Positive = 2000
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Save also when so much time has passed."""
    keep: Positive = 3
    """How many checkpoints stay."""
    best_metric: str | None = None
    """Keep also the checkpoint with the highest of this: lfw/accuracy, say."""
    asynchronous: bool = Field(default=True, alias="async")
    """Write in the background."""


class LogConfig(Section):
    """What is told."""

    every_steps: Positive = 10
    tensorboard: bool = True
    """Write the numbers for TensorBoard too, and with matplotlib the figures of each verification."""


class Config(Section):
    """A run description, complete."""

    recipe: Literal["arcface2022", "head"] = "arcface2022"
    """Defaults where the file is silent. arcface2022: the recipe of arcface_torch's published numbers (power 2,
    exact margin gradient, linear beyond π). head: its present code (power 1, straight-through, cos beyond π)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 2048
    run: RunConfig = RunConfig()
    data: DataConfig
    model: ModelConfig = ModelConfig()
    head: HeadConfig = HeadConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _centers_come_from_somewhere(self) -> Self:
        if self.head.init_from != "reinit" and self.model.init_from is None:
            raise ValueError(
                f"head.init_from: {self.head.init_from} needs model.init_from, whose centers it takes"
            )
        return self

    @property
    def eval_dir(self) -> str:
        """Where verification sets are looked for: beside the training data, if it is not said."""
        mixture = self.data.train.endswith((".yaml", ".yml"))
        return self.eval.dir or (str(Path(self.data.train).parent) if mixture else self.data.train)


RECIPES: dict[str, dict[str, object]] = {
    "arcface2022": {
        "optim": {"power": 2.0},
        "head": {"margin": {"gradient": "exact", "beyond_pi": "linear"}},
    },
    "head": {
        "optim": {"power": 1.0},
        "head": {"margin": {"gradient": "straight_through", "beyond_pi": "none"}},
    },
}
