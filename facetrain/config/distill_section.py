"""Section `distill` of the config: a teacher and its loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from facetrain.config.section import Section


class DistillConfig(Section):
    """Distillation: the network also learns the embeddings of a trained model, the teacher."""

    teacher: str
    """Path of the teacher: a run folder, a checkpoint, or a model file of any format that `facetrain eval` opens."""
    loss: Literal["cosine", "mse", "relational"] = "cosine"
    """Loss between the embeddings of network and teacher. cosine: 1 − cos of the two. mse: squared difference of their
    elements. relational: squared difference of the cosines of all pairs of images in the batch. With cosine and mse, a
    learned projection maps an embedding to the teacher's length if they differ."""
    cache: str | None = None
    """File with the teacher's embeddings of `data.train`, written by `facetrain embed` with a name that ends in
    .safetensors. They are those of the images before all augmentations but the flip. null: the teacher embeds the
    augmented images in each step."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor on this loss, which is added to the margin loss."""
