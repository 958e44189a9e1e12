"""Settings of the optimizer and the learning rate (section `optim` of the config)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from facetrain.optim.learning_rate import SCHEDULES
from facetrain.settings import OneOf, Positive, Settings

ADAMW_EPS = 1e-8
"""Term that AdamW adds to the denominator, for backbone and class centers."""


class MuonSettings(Settings):
    """Muon (Jordan et al., 2024): steps that are orthogonal matrices.

    It is for the weights of convolutions and linear layers before the last layer; the optimizer of `name` updates all
    other parameters and the class centers.
    """

    lr: Annotated[float, Field(gt=0)] = 0.02
    """Highest learning rate; it follows the schedule of `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay; a step multiplies the weights by 1 − learning rate · weight decay."""


class OptimSettings(Settings):
    """Optimizer and learning rate."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the backbone and the class centers."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Highest learning rate, for the whole global batch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum; only for sgd."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of the first and the second moment; only for adamw."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Weight decay of the parameters of the backbone that this optimizer updates, and of the class centers that take
    part in a step."""
    decay_norms: bool = True
    """Apply the weight decay to norms and biases, too, as arcface_torch does; AdaFace, CVLface and TFace do not."""
    muon: MuonSettings | None = None
    """`{}`: Muon with its default values. null: the optimizer of `name` updates all parameters."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """Largest L2 norm of the backbone gradient; a larger gradient is scaled down. null: no clipping."""
    accumulate: Positive = 1
    """Number of micro-batches per step, whose gradients are added up."""
    schedule: Annotated[str, OneOf(SCHEDULES)] = "polynomial"
    """Learning rate schedule after a linear warm-up. polynomial: down to 0. cosine: half a period of a cosine (SGDR
    without restarts). steps: times `gamma` at each of the `milestones`."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial schedule."""
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of the run as a fraction of `lr`; only for schedule cosine."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Epochs from the start of the run after which the learning rate falls; only for schedule steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor on the learning rate at each milestone; only for schedule steps."""
    batch_scaling: Literal["auto", "linear", "sqrt", "none"] = "auto"
    """Learning rate for another global batch than that of the config, in stages (`train.stages`) and with `--batch
    auto`. linear: `lr` times the ratio of the two. sqrt: times its square root. none: `lr`. auto: linear with sgd, sqrt
    with adamw."""
    warmup_epochs: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """Number of epochs of warm-up; may be a fraction."""

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps for each weight."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    def count_moments(self, weights: int, hidden: int) -> int:
        """Return the numbers that the optimizers keep for some weights, `hidden` of which Muon would update."""
        by_muon = hidden if self.muon else 0
        return by_muon + self.moments * (weights - by_muon)

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule != "cosine" and self.final_factor:
            raise ValueError("final_factor needs schedule cosine")
        if bool(self.milestones) != (self.schedule == "steps"):
            raise ValueError(
                "milestones and schedule steps need each other, for example milestones: [12, 20, 24]"
            )
        if sorted(set(self.milestones)) != list(self.milestones):
            raise ValueError(f"milestones must grow, not {list(self.milestones)}")
        return self
