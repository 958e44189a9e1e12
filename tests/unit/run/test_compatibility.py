"""A checkpoint's tensors and the config of the run that continues from it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.config.loading import build_config, plain_config
from facetrain.errors import ConfigError
from facetrain.run.compatibility import check_compatibility


def mobile(layers):
    return build_config(
        {"data": {"train": "x"}, "model": {"backbone": "mbf", "layers": layers}, "train": {"max_steps": 9}},
        "x",
    )


def check(before, now):
    """Check that a run with `now` as `model.layers` can continue from a checkpoint that was trained with `before`."""
    meta = {"model": {"config": plain_config(mobile(before))}}
    saved = SimpleNamespace(folder=Path("step_00000004"), step=4, meta=meta)
    check_compatibility(saved, mobile(now), SimpleNamespace(total_steps=9))


def test_the_published_numbers_of_blocks_may_be_written_out_or_left_out():
    check(None, [1, 4, 6, 2])
    check([1, 4, 6, 2], None)


def test_other_numbers_of_blocks_than_the_published_ones_are_refused_with_the_key():
    with pytest.raises(
        ConfigError, match=r"^model\.layers: .* with \[1, 4, 6, 2\], .* with \[2, 8, 12, 4\]; keep"
    ):
        check(None, [2, 8, 12, 4])
    with pytest.raises(
        ConfigError, match=r"^model\.layers: .* with \[2, 8, 12, 4\], .* with \[1, 4, 6, 2\]; keep"
    ):
        check([2, 8, 12, 4], None)
