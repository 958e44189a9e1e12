import cv2
import numpy as np
import pytest

from facetrain.data.images.align import align, similarity
from facetrain.face_landmarks import ARCFACE_TEMPLATE


def transformed(points, degrees, scale, shift):
    angle = np.deg2rad(degrees)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return scale * points @ rotation.T + shift


@pytest.mark.parametrize(
    ("degrees", "scale", "shift"), [(0, 1, (0, 0)), (30, 2.5, (40, -7)), (170, 0.3, (5, 5))]
)
def test_a_transformed_face_is_aligned(degrees, scale, shift):
    seen = transformed(ARCFACE_TEMPLATE, degrees, scale, np.array(shift))
    matrix = similarity(seen, ARCFACE_TEMPLATE)
    np.testing.assert_allclose(seen @ matrix[:, :2].T + matrix[:, 2], ARCFACE_TEMPLATE, atol=1e-9)


def test_the_transform_is_a_least_squares_optimum():
    random = np.random.default_rng(0)
    source, target = random.normal(size=(5, 2)), random.normal(size=(5, 2))

    def error(matrix):
        return np.square(source @ matrix[:, :2].T + matrix[:, 2] - target).sum()

    found = similarity(source, target)
    a, b = found[0, 0], found[1, 0]
    np.testing.assert_allclose(found[:, :2], [[a, -b], [b, a]], atol=1e-12)
    for da, db, dx, dy in random.normal(size=(200, 4)) * 0.05:
        assert error(found) <= error(
            np.array([[a + da, -b - db, found[0, 2] + dx], [b + db, a + da, found[1, 2] + dy]])
        )


def test_mirrored_points_do_not_give_a_reflection():
    matrix = similarity(ARCFACE_TEMPLATE * [-1, 1], ARCFACE_TEMPLATE)
    assert np.linalg.det(matrix[:, :2]) > 0


def test_coinciding_points_give_a_translation():
    np.testing.assert_allclose(similarity(np.ones((5, 2)), np.zeros((5, 2)))[:, 2], [-1, -1])


def test_the_landmarks_of_an_aligned_image_match_the_template():
    image = np.zeros((300, 260, 3), np.uint8)
    seen = transformed(ARCFACE_TEMPLATE, 20, 1.7, np.array([60, 10]))
    for x, y in seen:
        cv2.circle(image, (round(x), round(y)), 4, (255, 255, 255), -1)
    for size in (112, 56):
        found = align(image, seen, size)
        assert found.shape == (size, size, 3)
        for x, y in ARCFACE_TEMPLATE * (size / 112):
            assert found[round(y), round(x)].min() > 200
