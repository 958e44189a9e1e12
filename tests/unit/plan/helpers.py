"""Config of a small run, for forecasts."""

from facetrain.config.loading import build_config
from facetrain.config.schema import Config

SMALL_MODEL = {"backbone": "iresnet", "layers": [1] * 4, "widths": [16, 16, 32, 32], "embedding_size": 8}


def small_config(**sections) -> Config:
    """Return the config of a small run in float32, of which `sections` replace whole sections."""
    values = {
        "data": {"train": "none", "image_size": 32},
        "model": SMALL_MODEL,
        "train": {"precision": "fp32"} | sections.pop("train", {"batch_size": 4}),
        "eval": {"targets": []},
    }
    return build_config(values | sections, "test")
