"""Settings of teacher, batch size, length and limits (sections `distill` and `train` of the config)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from facetrain.settings import (
    Compilation,
    Expectations,
    PathText,
    Positive,
    Probability,
    Settings,
)


class DistillSettings(Settings):
    """Distillation: the network also learns the embeddings of a trained model, the teacher."""

    teacher: PathText
    """Path of the teacher: a run folder, a checkpoint, or a model file of any format that `facetrain eval` opens."""
    loss: Literal["cosine", "fixed_centers"] = "cosine"
    """Loss between the embeddings of network and teacher. cosine: 1 − cos of the two. fixed_centers: the margin loss of
    `head.margin` with the means of the teacher's embeddings as class centers. A learned projection maps an embedding to
    the teacher's length if they differ."""
    cache: PathText | None = None
    """File with the teacher's embeddings of `data.train`, written by `facetrain embed` with a name that ends in
    .safetensors. They belong to the images before all augmentations but the flip. null: the teacher embeds the
    augmented images in each step."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor on this loss, which is added to the margin loss."""
    margin_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the margin loss of the trained class centers. 0: the network learns from the teacher alone."""

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.loss == "fixed_centers" and self.cache is None:
            raise ValueError(
                "loss fixed_centers needs cache, the teacher's embeddings, from which the class centers are computed"
            )
        return self


class StageSettings(Settings):
    """List of stages: other values of some keys for the first epochs. Afterwards, the values of the sections hold."""

    until_epoch: Positive
    """Number of epochs of the run after which the stage ends. The next stage begins there."""
    batch_size: Positive | None = None
    """Value of `train.batch_size` in this stage. null: use `train.batch_size`."""
    global_batch_size: Positive | None = None
    """Value of `train.global_batch_size` in this stage. null: use `train.global_batch_size`."""
    sample_rate: Probability | None = None
    """Value of `head.sample_rate` in this stage. null: use `head.sample_rate`."""
    expectations: Expectations | None = None
    """Value of `head.expectations` in this stage. null: use `head.expectations`."""

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        if self.model_fields_set == {"until_epoch"}:
            names = ", ".join(name for name in type(self).model_fields if name != "until_epoch")
            raise ValueError(f"the stage changes nothing; give it at least one of {names}")
        return self


class StopEarlySettings(Settings):
    """Early end of a run, when a metric of the verification no longer rises, such as `{metric: lfw/accuracy}`."""

    metric: str
    """Metric, as for `checkpoint.best_metric`."""
    patience: Positive = 5
    """Number of consecutive verifications without a gain after which the run ends. The one before the first step does
    not count."""
    min_gain: Annotated[float, Field(ge=0)] = 0.0
    """Difference from the best value that a larger value must exceed to be a gain."""


class TrainSettings(Settings):
    """Length of the run, batch size, number formats, and limits."""

    batch_size: Positive | None = None
    """Images per rank and micro-batch. null: 128, unless `global_batch_size` is given."""
    global_batch_size: Positive | None = None
    """Images per step, over all ranks and micro-batches. null: given by `batch_size`."""
    epochs: Positive = 20
    """Number of passes over the training data."""
    stages: tuple[StageSettings, ...] = ()
    max_steps: Positive | None = None
    """Step after which the run ends, if `epochs` does not end it earlier; the learning rate schedule is fitted to it.
    null: after all epochs."""
    stop_early: StopEarlySettings | None = None
    """null: the run ends at its last step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the backbone. Its last layer and the loss are always computed in float32; the products with the
    class centers are in bfloat16 with bf16, and with fp16 where the GPU has products of it. auto: bf16
    where the GPU or the CPU has products of it; otherwise fp16 on a GPU, and fp32 on a CPU. A run keeps the format
    with which it began."""
    compile: Compilation = "off"
    """Compile the blocks of the backbone with torch.compile. The compiled code is cached for later runs.
    reduce-overhead: also replay it from CUDA graphs, for small batches, where the GPU waits for the host."""
    deterministic: bool = False
    """Use only algorithms whose results are equal bit for bit in every run, also on a GPU. Slower, because fewer
    algorithms are left."""
    compress_gradients: Literal["none", "fp16", "bf16"] = "none"
    """Number format in which ranks exchange the gradients of the backbone. none: float32."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: cuda if there is a GPU, otherwise cpu."""
    keep_freed_memory: bool = True
    """On a CPU, keep freed memory for the next step: faster, but needs up to twice the memory."""
    timeout_s: Annotated[float, Field(gt=0, le=10_000_000)] = 600.0
    """Seconds that a rank waits for the others before it reports them as lost."""

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        if self.batch_size and self.global_batch_size:
            raise ValueError(
                "give either batch_size (per rank) or global_batch_size (of all ranks), not both"
            )
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        ends = [stage.until_epoch for stage in self.stages]
        if sorted(set(ends)) != ends:
            raise ValueError(f"stages: until_epoch must grow from stage to stage, not {ends}")
        if ends and ends[-1] > self.epochs:
            raise ValueError(
                f"stages: the last stage ends after epoch {ends[-1]}, but the run has {self.epochs} epochs; lower "
                "until_epoch, or raise epochs"
            )
        # A stage counts images as the config does, by rank or by step: with both, a change of the number of ranks would
        # change the ratio of two stages.
        counted = {
            "batch_size": "the images of a rank (train.global_batch_size counts the images of all ranks)",
            "global_batch_size": "the images of all ranks",
        }
        key, other = reversed(counted) if self.global_batch_size else counted
        if any(getattr(stage, other) for stage in self.stages):
            raise ValueError(f"stages: give {key} and not {other}, because train.{key} counts {counted[key]}")
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> Self:
        if self.deterministic and self.compile != "off":
            raise ValueError(
                f"deterministic: true cannot be combined with compile: {self.compile}, because the compiler may choose "
                "other code for the same network in each process"
            )
        if self.deterministic and self.compress_gradients != "none":
            raise ValueError(
                f"deterministic: true cannot be combined with compress_gradients: {self.compress_gradients}, because a "
                "restarted process adds the compressed gradients of three or more ranks in another order"
            )
        return self
