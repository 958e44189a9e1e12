"""Schema of the run config: all keys with type, bounds, default and description.

The docstrings of the keys become the descriptions of `facetrain config schema` and of docs/config.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


def _switch_name(value: object) -> object:
    """Return on or off for a truth value: YAML reads the words on and off as true and false."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_name)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
BackboneName = Literal[
    "r18", "r34", "r50", "r100", "r200", "r2060",
    "mbf_small", "mbf", "mbf_large",
    "vit_t", "vit_s", "vit_b", "vit_l", "vit_h",
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    "iresnet",
]  # fmt: skip


class Section(BaseModel):
    """Section of the config: rejects unknown keys, and cannot be changed after it is read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
    )


class RunConfig(Section):
    """Name and place of the run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    """Name of the run. The run folder is `dir`/`name`; it must not exist yet."""
    dir: str = "runs"
    """Folder that holds the run folders."""


class AugmentConfig(Section):
    """Image augmentations, as probabilities from 0 to 1. Each is drawn independently for each image."""

    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    low_resolution: Probability = 0.0
    """Probability of shrinking the image to 50–80 % of its size and enlarging it again."""
    blur: Probability = 0.0
    """Probability of a Gaussian blur."""
    gray: Probability = 0.0
    """Probability of a conversion to grayscale."""
    color: Probability = 0.0
    """Probability of a change of brightness, contrast and saturation."""
    crop: Probability = 0.0
    """Probability of a random crop, enlarged to the full size."""
    erase: Probability = 0.0
    """Probability of covering a random rectangle."""
    jpeg: Probability = 0.0
    """Probability of a JPEG compression with a low quality."""


class SyntheticConfig(Section):
    """Synthetic dataset of rendered faces, generated if the folder `data.train` does not exist."""

    identities: Positive = 400
    """Number of identities to train on."""
    images_per_identity: Positive = 20
    """Number of images of each identity."""
    eval_identities: Annotated[int, Field(ge=2)] = 100
    """Number of further identities for the verification set, which are not in the training data."""
    eval_pairs: Annotated[int, Field(ge=20, multiple_of=20)] = 1000
    """Number of pairs in the verification set `synth`, half of them of the same identity; a multiple of 20."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the generator; another seed generates other identities."""


class DataConfig(Section):
    """Training data."""

    train: str
    """Path of the training data: a folder with train.rec, with one folder per identity, or with tar or Parquet
    shards; a list file; or the YAML file of a mixture of datasets."""
    image_size: Annotated[int, Field(ge=16, le=1024)] = 112
    """Width and height of the network input, in pixels."""
    num_classes: Positive | None = None
    """Expected number of identities; a run with other data is refused. null: no check."""
    num_images: Positive | None = None
    """Expected number of images; a run with other data is refused. null: no check."""
    min_images_per_identity: Positive = 1
    """Smallest number of images of an identity; identities with fewer images are left out."""
    workers: NotNegative | Literal["auto"] = "auto"
    """Number of processes per rank that read and decode images. auto: the usable CPU cores divided by the ranks on
    the machine, at most 16. 0: no processes, the training process reads."""
    shuffle: Literal["full", "blocks"] = "full"
    """Order of the images. full: a random permutation of all images. blocks: images are read in contiguous blocks
    and shuffled within a window, for slow disks."""
    bad_records: Literal["error", "skip"] = "error"
    """Action for an image that cannot be decoded. error: end the run. skip: use the next image instead."""
    decode: Literal["cpu", "gpu", "dali"] = "cpu"
    """Decoder of the images. cpu: OpenCV. gpu: nvJPEG on CUDA, whose pixels may differ by rounding. dali: NVIDIA
    DALI, if it is installed."""
    max_skipped: NotNegative | None = None
    """Largest number of images that all ranks together may skip with `bad_records: skip`; the run ends if there are
    more. null: no limit."""
    augment: AugmentConfig = AugmentConfig()
    synthetic: SyntheticConfig | None = None
    """Synthetic dataset to generate if `train` does not exist. null: `train` must exist."""


class ModelConfig(Section):
    """Backbone network, which maps an image to an embedding."""

    backbone: BackboneName = "r50"
    """Architecture of the backbone: an IResNet (r18 to r2060), MobileFaceNet (mbf…), ViT (vit_…), or ResNet of
    torchvision (resnet…); iresnet takes `layers` and `widths`."""
    embedding_size: Positive = 512
    """Number of elements of an embedding."""
    layers: tuple[Positive, ...] | None = None
    """Number of blocks in each of the four stages; only for backbone iresnet, and required there."""
    widths: tuple[Positive, ...] | None = None
    """Number of channels in each of the four stages; only for backbone iresnet, and required there."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping a feature before the last layer."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass instead of storing them: needs less memory, and takes about a third
    longer."""
    batch_norm: Literal["auto", "local", "sync"] = "auto"
    """Batch norm statistics. local: of each rank. sync: over all ranks. auto: sync if `train.global_batch_size` is
    given, so that the result does not depend on the number of ranks; otherwise local, as in the published recipes."""
    init_from: str | None = None
    """Weights to start from: a run folder, a checkpoint, a .safetensors file, arcface_torch's .pt, MXNet's
    -symbol.json, or an .onnx file. null: random weights."""
    freeze: tuple[str, ...] = ()
    """Prefixes of parameter names; the parameters that match are not trained."""
    lr_factors: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Factors on the learning rate by prefix of the parameter name; the longest matching prefix counts."""

    @model_validator(mode="after")
    def _check_layers_and_widths(self) -> Self:
        is_iresnet = self.backbone == "iresnet"
        if is_iresnet and (self.layers is None or self.widths is None):
            raise ValueError("backbone iresnet needs layers and widths, with four numbers each")
        if is_iresnet and not len(self.layers or ()) == len(self.widths or ()) == 4:
            raise ValueError("layers and widths must have four numbers each")
        if not is_iresnet and (self.layers or self.widths):
            raise ValueError(f"layers and widths are only for backbone iresnet, not {self.backbone}")
        return self


class MarginConfig(Section):
    """Margin of the softmax loss."""

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
    """Formula of the target logit. arcface: cos(θ + m2). cosface: cos θ − m3. combined: cos(m1·θ + m2) − m3.
    softmax: cos θ, no margin. adaface: m2 scaled by the image quality. magface: m2 by the norm of the embedding, see
    `norms` and `margins`. curricularface: arcface with a growing weight on hard negatives. elastic_arcface,
    elastic_cosface: m2 or m3 drawn at random for each image."""
    scale: Annotated[float, Field(gt=0)] = 64.0
    """Factor s on the cosines."""
    m1: Annotated[float, Field(ge=1)] = 1.0
    """Factor on the target angle (SphereFace); only for type combined."""
    m2: Annotated[float, Field(ge=0)] | None = None
    """Margin added to the target angle, in radians. null: the published value (0.5; adaface 0.4)."""
    m3: Annotated[float, Field(ge=0)] | None = None
    """Margin subtracted from the target cosine. null: the published value (cosface 0.4, elastic_cosface 0.35,
    combined 0)."""
    h: Annotated[float, Field(gt=0)] = 0.333
    """Width to which image qualities are scaled within [−1, 1]; only for type adaface."""
    average: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Weight of each batch in the running averages; only for types adaface and curricularface."""
    sigma: Annotated[float, Field(ge=0)] = 0.0125
    """Standard deviation of the random margin; only for types elastic_arcface and elastic_cosface."""
    norms: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (10.0, 110.0)
    """Smallest and largest norm of the embedding, between which the margin grows; only for type magface."""
    margins: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = (0.45, 0.8)
    """Margins at the two norms, in radians; only for type magface."""
    norm_weight: Annotated[float, Field(ge=0)] = 35.0
    """Weight of the regularizer that rewards large norms; only for type magface."""
    gradient: Literal["exact", "straight_through"] = "exact"
    """Gradient of the margin. exact: the derivative of the formula. straight_through: as in arcface_torch's present
    code, which does not differentiate the margin."""
    beyond_pi: Literal["none", "linear"] = "linear"
    """Target logit where θ + m2 > π. none: cos(θ + m2), which grows again. linear: cos θ − m2·sin m2, as in the code
    of the ArcFace paper."""
    filter_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Cosine above which a negative class counts as label noise; its logit is set to 0. 0: no filter."""

    @model_validator(mode="after")
    def _check_margins(self) -> Self:
        if self.type == "cosface" and self.m3 == 0:
            raise ValueError("m3 must be greater than 0 for cosface (published: 0.4)")
        if self.type != "combined" and self.m1 != 1:
            raise ValueError(
                f"m1 must be 1 for {self.type}, not {self.m1:g}; use type combined for another m1"
            )
        if self.type == "curricularface" and self.filter_threshold:
            raise ValueError(
                "filter_threshold cannot be used with curricularface: both change the hard negatives"
            )
        if self.norms[0] >= self.norms[1]:
            raise ValueError("norms must be in increasing order")
        return self


class HeadConfig(Section):
    """Class centers, divided among the ranks, and their loss."""

    init_from: Literal["reinit", "keep", "extend"] = "reinit"
    """Class centers of a run with `model.init_from`. reinit: random centers. keep: the centers of that model, which
    must have the same identities. extend: the centers of that model, and random ones for the further identities of
    the dataset."""
    margin: MarginConfig = MarginConfig()
    loss: Literal["softmax", "unified"] = "softmax"
    """Loss function. softmax: cross-entropy over the classes. unified: UniFace, with one learned threshold between
    positive and negative cosines; published with margin cosface and m3 0.4."""
    negative_weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the negative classes in the loss; only for loss unified."""
    sub_centers: Positive = 1
    """Number of centers per identity, of which the nearest one counts (Sub-center ArcFace, published with 3). Memory
    and time grow with it."""
    drop_sub_centers_epoch: Annotated[float, Field(ge=0)] | None = None
    """Epoch from which only the dominant sub-center of each identity is used, and images far from it are left out;
    may be a fraction. null: never."""
    drop_angle: Annotated[float, Field(gt=0, le=180)] = 75.0
    """Angle to the dominant sub-center, in degrees, beyond which an image is left out as label noise; with
    `drop_sub_centers_epoch`."""
    sample_rate: Probability = 1.0
    """Fraction of the classes that take part in a step (Partial FC). 1: all classes. 0: only the classes of the
    batch."""
    sample_block: Positive | Literal["auto"] = "auto"
    """Number of consecutive classes that are sampled together. auto: 8 with placement disk, where they are read at
    once; otherwise 1."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which centers are stored."""
    momentum_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Data type in which the momentum of the centers is stored. int8: in blocks of 128 values with one scale each;
    only for sgd."""
    placement: Literal["device", "host", "disk"] = "device"
    """Memory that holds centers and momentum: of the GPU (device), of the host, or a file on disk. With host and
    disk, only the sampled rows are copied to the GPU."""
    chunk_size: Positive | Literal["auto"] = "auto"
    """Number of classes whose logits are in memory at the same time. auto: chosen by the size of the batch."""

    @model_validator(mode="after")
    def _check_sub_centers(self) -> Self:
        if self.drop_sub_centers_epoch is not None and self.sub_centers == 1:
            raise ValueError("drop_sub_centers_epoch needs sub_centers of at least 2 (published: 3)")
        return self


class OptimConfig(Section):
    """Optimizer and learning rate."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the backbone and the class centers."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Highest learning rate, for the whole global batch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum; only for sgd."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the first and the second moment; only for adamw."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the denominator; only for adamw."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of all parameters of the backbone, and of the class centers that take part in a step."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """Largest L2 norm of the backbone gradient; a larger gradient is scaled down. null: no clipping."""
    accumulate: Positive = 1
    """Number of micro-batches per step, whose gradients are added up."""
    schedule: Literal["polynomial"] = "polynomial"
    """Learning rate schedule: linear warm-up, then a polynomial down to 0."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial schedule."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Number of epochs of warm-up; may be a fraction."""


class TrainConfig(Section):
    """Length of the run, batch size, number formats, and limits."""

    batch_size: Positive | None = None
    """Images per rank and micro-batch. null: 128, unless `global_batch_size` is given."""
    global_batch_size: Positive | None = None
    """Images per step, over all ranks and micro-batches. null: given by `batch_size`."""
    epochs: Positive = 20
    """Number of passes over the training data."""
    max_steps: Positive | None = None
    """Step after which the run ends, and to which the learning rate schedule is fitted. null: after all epochs."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of the backbone. The last layer and the loss are always computed in float32."""
    tf32: bool = True
    """With precision fp32 and in verification, let a GPU round the factors of convolutions to TF32 (10 bits after the
    leading one instead of 23): several times faster; PyTorch's default, too. Products of matrices are never rounded."""
    fused: Switch = "auto"
    """Run batch norm, PReLU and residual addition of an IResNet as fused Triton kernels: less memory traffic, half of
    the activations. auto: on GPUs where the kernels agree with PyTorch at the start of the run."""
    compile: Switch = "auto"
    """Compile the blocks of the backbone with torch.compile. The compiled code is cached for later runs. auto: on a
    GPU, if the first hundred steps show that it is faster; on a CPU, off."""
    cuda_graphs: Switch = "auto"
    """Record the kernels of the backbone's forward and backward pass once, and replay them with one launch each. auto:
    on a GPU with at most 128 images per rank, if the first hundred steps show that it is faster."""
    deterministic: bool = False
    """Use only algorithms whose results are equal bit for bit in every run, also on a GPU. Slower, because fewer
    algorithms are left; `compile` and `cuda_graphs` are off if they are auto."""
    channels_last: bool = True
    """Store images and activations in the channels_last memory layout, which is faster for convolutions."""
    compress_gradients: Literal["none", "fp16", "bf16"] = "none"
    """Number format in which ranks exchange the gradients of the backbone. none: float32."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: cuda if there is a GPU, otherwise cpu."""
    keep_freed_memory: bool = True
    """On a CPU, keep freed memory for the next step: faster, but needs up to twice the memory."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a rank waits for the others before it reports them as lost."""
    max_skipped_steps: Positive = 10
    """Number of consecutive steps whose loss or gradient is not finite, after which the run ends."""
    loss_spike: Annotated[float, Field(gt=0)] | None = None
    """Number of deviations above the median of the last 128 losses from which a loss is reported as a spike; 10 is a
    good start. null: no reports."""

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        if self.batch_size and self.global_batch_size:
            raise ValueError(
                "give either batch_size (per rank) or global_batch_size (of all ranks), not both"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> Self:
        if self.deterministic and self.compile == "on":
            raise ValueError(
                "deterministic: true cannot be combined with compile: on, because the compiler may choose other code "
                "for the same network in each process"
            )
        if self.deterministic and self.compress_gradients != "none":
            raise ValueError(
                f"deterministic: true cannot be combined with compress_gradients: {self.compress_gradients}, because a "
                "restarted process adds the compressed gradients of three or more ranks in another order"
            )
        return self


class EvalConfig(Section):
    """Verification during training."""

    targets: tuple[str, ...] = ("lfw", "cfp_fp", "agedb_30")
    """Verification sets: names of .bin files in `dir`, or paths."""
    dir: str | None = None
    """Folder of the verification sets. null: the folder of `data.train`."""
    every_steps: Positive = 2000
    """Number of steps between two verifications. The run also verifies before its first and after its last step."""
    batch_size: Positive = 256
    """Images per rank that are embedded at once."""


class CheckpointConfig(Section):
    """Checkpoints."""

    every_steps: Positive = 2000
    """Number of steps between two checkpoints. The last step is always saved."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes after which a checkpoint is saved, in addition to `every_steps`. null: no limit."""
    keep: Positive = 3
    """Number of newest checkpoints that are kept."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept too, for example lfw/accuracy. null: only the newest checkpoints."""
    asynchronous: bool = Field(default=True, alias="async")
    """Write checkpoints in the background while the run trains."""


class LogConfig(Section):
    """Reports."""

    every_steps: Positive = 10
    """Number of steps between two reports."""
    tensorboard: bool = True
    """Write metrics for TensorBoard and the figures of each verification."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the metrics and the config; needs `pip install facetrain[wandb]`. null:
    none."""
    mlflow: str | None = None
    """Tracking URI of MLflow that gets the metrics and the config, for example http://host:5000; needs `pip install
    facetrain[mlflow]`. null: none."""
    mlflow_experiment: str = "facetrain"
    """Experiment of MLflow to which the run belongs; with `mlflow`."""


class Config(Section):
    """Config of a run."""

    recipe: Literal["arcface2022", "head"] = "arcface2022"
    """Defaults of keys that the config does not give. arcface2022: the recipe of arcface_torch's published results
    (power 2, exact margin gradient, beyond_pi linear). head: its present code (power 1, straight-through gradient,
    beyond_pi none)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 2048
    """Seed of all random numbers."""
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
    def _check_head_init_from(self) -> Self:
        if self.head.init_from != "reinit" and self.model.init_from is None:
            raise ValueError(
                f"head.init_from: {self.head.init_from} needs model.init_from, the model that has the centers"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic_decoder(self) -> Self:
        if self.train.deterministic and self.data.decode != "cpu":
            raise ValueError(
                f"train.deterministic: true cannot be combined with data.decode: {self.data.decode}, because nvJPEG "
                "does not promise the same pixels in every run"
            )
        return self

    @property
    def eval_dir(self) -> str:
        """Folder of the verification sets: `eval.dir`, or the folder of the training data."""
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
