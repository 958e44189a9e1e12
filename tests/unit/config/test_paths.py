"""Paths and addresses in a config."""

import pytest

from facetrain.config.loading import build_config
from facetrain.config.paths import with_downloads
from facetrain.errors import DataError


def test_an_address_that_cannot_be_used_is_named_with_its_key():
    config = build_config({"data": {"train": "s3://bucket/shards"}, "eval": {"targets": ["lfw"]}}, "test")

    def refuse(address):
        raise DataError(f"{address}: not found")

    with pytest.raises(DataError, match=r"^eval\.targets: s3://bucket/shards/lfw\.bin"):
        with_downloads(config, refuse)
