"""Digests of the training data, by which a resumed run notices another dataset or other landmarks."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from facetrain.errors import ConfigError
from facetrain.run.folder.data_digests import DataDigests, check_data, digest_landmarks


def checkpoint_of(**meta):
    return SimpleNamespace(folder=Path("step_5"), meta=meta, manifest=SimpleNamespace(num_classes=3))


def check(digests, set_keys=(), num_classes=3, **meta):
    check_data(checkpoint_of(**meta), digests, num_classes, set(set_keys))


def test_landmarks_have_a_digest_of_their_numbers_and_gaps():
    points = np.random.default_rng(0).uniform(0, 1, (9, 5, 2)).astype(np.float32)
    digests = {digest_landmarks(SimpleNamespace(landmarks=None))}
    assert digests == {""}
    for index in (None, 0, 8):
        changed = points.copy()
        if index is not None:
            changed[index, 2, 1] = np.nan
        digests.add(digest_landmarks(SimpleNamespace(landmarks=changed)))
    assert len(digests) == 4
    assert digest_landmarks(SimpleNamespace(landmarks=points[::2][::-1].copy())) == digest_landmarks(
        SimpleNamespace(landmarks=points[::2][::-1])
    )


def test_other_landmarks_are_refused_unless_the_command_line_sets_the_data():
    saved = {"dataset": "d", "landmarks": "a"}
    check(DataDigests("d", "a"), **saved)
    with pytest.raises(
        ConfigError, match=r"^data.train: step_5 was trained with landmarks with digest a, .* now have b"
    ):
        check(DataDigests("d", "b"), **saved)
    with pytest.raises(ConfigError, match="now have none; restore the landmark file"):
        check(DataDigests("d", ""), **saved)
    for key in ("data.train", "data", "data.synthetic.seed"):
        check(DataDigests("d", "b"), [key], **saved)
    with pytest.raises(ConfigError, match="now have b"):
        check(DataDigests("d", "b"), ["data.workers", "data.bad_records", "data.augment.flip"], **saved)
    check(DataDigests("d", "b"), dataset="d")  # from before landmarks had a digest
    with pytest.raises(ConfigError, match=r"trained on a dataset with digest d, but this one has e"):
        check(DataDigests("e", "a"), **saved)
    check(DataDigests("e", "a"), num_classes=4, **saved)  # refused later, when the centers are loaded
