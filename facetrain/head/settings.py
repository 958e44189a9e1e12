"""Settings of margin, loss, class centers and their sampling (section `head` of the config)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from facetrain.head.margins.registry import MARGINS
from facetrain.own_parts import is_place
from facetrain.settings import Expectations, OneOf, Positive, Probability, Settings, Switch

CLASSES_PER_READ = 8
"""Consecutive classes that are sampled together with placement disk, which reads neighbors at once."""


_MARGIN_OF = {
    "cosface": "m3",
    "elastic_cosface": "m3",
    "adaface": "m2",
    "curricularface": "m2",
    "elastic_arcface": "m2",
}
"""Key of the one margin of a type."""


def _require_radians(margin: float) -> float:
    # A number in degrees turns the angle several times around, and the loss can be 0 from the first step on.
    if margin > math.pi / 2:
        raise ValueError(
            f"{margin:g} is more than π/2; the margin is in radians: {margin:g} degrees are {math.radians(margin):.3g}"
        )
    return margin


class MarginSettings(Settings):
    """Margin of the softmax loss."""

    type: Annotated[str, OneOf(MARGINS, own=True)] = "arcface"
    """Formula of the target logit. arcface: cos(θ + m2). cosface: cos θ − m3. combined: cos(m1·θ + m2) − m3.
    softmax: cos θ, no margin. adaface: m2 scaled by the image quality. magface: a margin that grows with the norm of
    the embedding. curricularface: arcface with a growing weight on hard negatives. elastic_arcface, elastic_cosface: m2
    or m3 drawn at random for each image, with a deviation of 0.05. Further parameters have the published values.
    MODULE:NAME: a function of the target cosines (and norms) of your own, see docs/own_parts.md."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a margin of your own."""
    scale: Annotated[float, Field(gt=0)] = 64.0
    """Factor s on the cosines."""
    m1: Annotated[float, Field(ge=1)] = 1.0
    """Factor on the target angle (SphereFace); only for type combined."""
    m2: Annotated[float, Field(ge=0), AfterValidator(_require_radians)] | None = None
    """Margin added to the target angle, in radians, at most π/2; only for types arcface, combined, adaface,
    curricularface and elastic_arcface. null: the published value (0.5; adaface 0.4)."""
    m3: Annotated[float, Field(ge=0, le=2)] | None = None
    """Margin subtracted from the target cosine; only for types cosface, combined and elastic_cosface. null: the
    published value (cosface 0.4, elastic_cosface 0.35, combined 0)."""
    gradient: Literal["exact", "straight_through"] = "exact"
    """Margin's derivative and its form beyond π; only for types arcface and combined. exact: the derivative of
    the formula, and, with m1 = 1, cos θ − m2·sin m2 where θ + m2 > π, as in the code of the ArcFace paper.
    straight_through: as in arcface_torch's present code, which does not differentiate the margin, and where
    cos(θ + m2) grows again."""
    filter_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Cosine above which a negative class counts as label noise; its logit is set to 0. 0: no filter."""

    @model_validator(mode="after")
    def _check_margins(self) -> Self:
        # Without its margin, each of these is a plain softmax under another name.
        name = _MARGIN_OF.get(self.type)
        if name and getattr(self, name) == 0:
            raise ValueError(f"{name} must be greater than 0 for {self.type}; null is the published value")
        # Refused and not ignored: a recipe with an m1 that has no effect would not be what it says.
        if self.type != "combined" and self.m1 != 1:
            raise ValueError(
                f"m1 must be 1 for {self.type}, not {self.m1:g}; use type combined for another m1"
            )
        if self.options and not is_place(self.type):
            raise ValueError(f"options are for a margin of your own, MODULE:NAME, not for {self.type}")
        if self.type == "curricularface" and self.filter_threshold:
            raise ValueError(
                "filter_threshold cannot be used with curricularface: both change the hard negatives"
            )
        return self


class HeadSettings(Settings):
    """Class centers, divided among the ranks, and their loss."""

    init_from: Literal["reinit", "keep", "extend"] = "reinit"
    """Class centers of a run with `model.init_from`. reinit: random centers. keep: the centers of that model, which
    must have the same identities. extend: the centers of the identities that it knows, and random ones for new ones.
    Identities are the same by name; without names, by number."""
    margin: MarginSettings = MarginSettings()
    sample_rate: Probability = 1.0
    """Fraction of the classes that take part in a step (Partial FC). 1: all classes. 0: only the classes of the
    batch."""
    expectations: Expectations = "off"
    """Second anchor of each class in the loss: the expectation of its embeddings (progressive cluster optimization of
    LVFace). moving: it follows the embeddings. fixed: it stays as an earlier stage (`train.stages`) has left it, or is
    the center of the class in the model of `init_from`, whose expectations are not taken over. off: only the
    center. The other two nearly double memory and time of the head."""
    expectation_margin: Annotated[float, Field(ge=0)] = 0.4
    """Margin subtracted from the cosine to the expectation of the target class; with `expectations`."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which centers are stored."""
    momentum_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Data type in which the momentum of the centers, with adamw both moments, is stored. int8: in blocks of 128
    values with one scale each; only for sgd."""
    placement: Literal["device", "host", "disk"] = "device"
    """Memory that holds centers and momentum: of the GPU (device), of the host, or a file on disk. With host and
    disk, only the sampled rows are copied to the GPU."""
    chunk_size: Positive | Literal["auto"] = "auto"
    """Number of classes whose logits are in memory at the same time. auto: chosen by the size of the batch."""
    recompute: Switch = "auto"
    """Compute the logits again in the backward pass. off: keep their exponentials from the forward pass, which saves a
    quarter of the head's products and needs 2 (products in bfloat16) or 4 bytes per image of the global batch and
    class of the sample. auto: off if that is at most a quarter of the memory of float32 centers and momentum with
    placement device, or 256 MiB. Ignored with curricularface, and with scales above 64."""

    @property
    def classes_per_block(self) -> int:
        """Number of consecutive classes that are sampled together."""
        return CLASSES_PER_READ if self.placement == "disk" else 1
