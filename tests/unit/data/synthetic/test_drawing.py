import cv2
import numpy as np
import pytest

from facetrain.data.images.decode import decode_rgb
from facetrain.data.synthetic.drawing import draw_face, draw_jpeg
from facetrain.data.synthetic.identity import sample_identity
from facetrain.data.synthetic.photo import sample_photo
from facetrain.embeddings.photo_check import PhotoCheck
from facetrain.verify.metrics.fold_accuracy import fold_accuracy


def baseline_accuracy(features, same):
    distance = np.square(features[0::2] - features[1::2]).reshape(len(same), -1).sum(1)
    return fold_accuracy(distance / distance.max() * 3.99, same).mean


@pytest.mark.slow
def test_neither_mean_colors_nor_raw_pixels_separate_identities():
    random = np.random.default_rng(0)
    drawn, same = [], np.arange(300) % 2 == 0
    for of_one_identity in same:
        first = int(random.integers(200))
        for number in (first, first if of_one_identity else (first + 1 + int(random.integers(198))) % 200):
            photo = sample_photo(0, number, int(random.integers(1000)))
            drawn.append(draw_face(sample_identity(0, number), photo, 64))
    images = np.stack(drawn).astype(np.float64)
    assert drawn[0].dtype == np.uint8 and len(np.unique(images[::2].mean((1, 2, 3)))) == len(images) // 2
    small = np.stack([cv2.resize(image, (16, 16), interpolation=cv2.INTER_AREA) for image in images])
    normed = small - small.mean((1, 2, 3), keepdims=True)
    normed /= np.linalg.norm(normed.reshape(len(normed), -1), axis=1)[:, None, None, None]
    for features in (images.mean((1, 2)), images, small, normed):
        assert baseline_accuracy(features, same) < 0.75


def test_a_face_depends_on_its_numbers_alone_and_looks_like_an_aligned_face():
    first = draw_jpeg(0, 1, 2, 56)
    check = PhotoCheck()
    for identity in range(80):
        check(decode_rgb(draw_jpeg(0, identity, 0, 112), location="x"), identity, 112)
    assert check.finding() is None
    assert draw_jpeg(0, 1, 2, 56) == first
    others = {draw_jpeg(*numbers, 56) for numbers in ((0, 1, 3), (0, 2, 2), (1, 1, 2))}
    assert len(others | {first}) == 4
