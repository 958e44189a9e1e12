"""Augmentations beside torchvision, OpenCV and libjpeg."""

import cv2
import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torchvision.io import decode_jpeg, encode_jpeg

from facetrain.data.augmentations import (
    blur,
    crop_in_place,
    erase,
    jpeg,
    photometric,
    resample,
    rotation,
)
from facetrain.data.augmentations.draws import Draws
from facetrain.data.images.normalize import normalize
from tests.support.datasets import smooth_image

COUNT, SIDE = 40, 48


def draws(name="x", epoch=0):
    return Draws(3, epoch, name, torch.arange(COUNT), torch.device("cpu"))


@pytest.fixture
def image():
    return normalize(torch.from_numpy(np.stack([smooth_image(number, SIDE) for number in range(COUNT)])))


def test_resampling_is_that_of_opencv(image):
    small = ((0.2 + 0.8 * draws().on_host(1)) * SIDE).long().tolist()
    down, up = (draws().choice(number, 5).tolist() for number in (2, 3))
    changed = resample.augment(image, draws())
    for number, one in enumerate(image):
        pixels = np.ascontiguousarray(one.permute(1, 2, 0).numpy())
        first, second = (resample.INTERPOLATIONS[each[number]] for each in (down, up))
        expected = cv2.resize(pixels, (small[number],) * 2, interpolation=first)
        expected = cv2.resize(expected, (SIDE, SIDE), interpolation=second).clip(-1, 1)
        np.testing.assert_allclose(changed[number].permute(1, 2, 0).numpy(), expected, atol=0.01)


def test_photometric_changes_are_those_of_torchvision(image):
    functions = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)
    factors = [draws().between(number, 0.5, 1.5).tolist() for number in (1, 2, 3)]
    orders = [photometric._ORDERS[number] for number in draws().choice(4, 6).tolist()]
    changed = photometric.augment(image, draws())
    for number, one in enumerate(image):
        expected = (one + 1) / 2
        for kind in orders[number]:
            expected = functions[kind](expected, factors[kind][number])
        torch.testing.assert_close((changed[number] + 1) / 2, expected, atol=2e-4, rtol=0)


def test_a_rotation_is_that_of_torchvision_and_moves_landmarks_with_the_pixels(image):
    angle = torch.rad2deg(draws().between(1, -rotation._LARGEST, rotation._LARGEST)).tolist()
    changed = rotation.augment(image, draws())
    for number, one in enumerate(image):
        expected = TF.rotate(one + 1, -angle[number], interpolation=TF.InterpolationMode.BILINEAR) - 1
        assert (changed[number] - expected).abs()[:, 8:-8, 8:-8].max() < 0.02
    points = torch.full((COUNT, 5, 2), 0.3)
    marked = torch.full((COUNT, 3, 200, 200), -1.0)
    marked[:, :, 58:63, 58:63] = 1.0
    moved = rotation.move(points, draws())[:, 0] * 200
    for number, one in enumerate(rotation.augment(marked, draws())):
        weight = one[0] + 1
        center = [(weight.sum(axis) * (torch.arange(200) + 0.5)).sum() / weight.sum() for axis in (0, 1)]
        assert (torch.stack(center) - moved[number]).abs().max() < 0.75


@pytest.mark.parametrize("quality", [30, 60, 95])
def test_the_loss_of_jpeg_is_that_of_libjpeg(quality):
    photos = normalize(torch.from_numpy(np.stack([smooth_image(number, 112) for number in range(9)])))
    for one, found in zip(photos, jpeg.compressed(photos, torch.full((9,), float(quality))), strict=True):
        pixels = ((one + 1) * 127.5).round().byte()
        expected = decode_jpeg(encode_jpeg(pixels, quality)).float()
        loss, error = (expected - pixels).abs().mean(), ((found + 1) * 127.5 - expected).abs().mean()
        assert error < 1.2 and error < (0.5 if quality < 90 else 1) * loss


def test_a_crop_in_place_keeps_pixels_and_blackens_the_rest(image):
    changed = crop_in_place.augment(image, draws())
    is_black = (changed == -1).all(1)
    assert (torch.where(is_black[:, None], image, changed) == image).all()
    kept = 1 - is_black.float().mean((1, 2))
    assert kept.min() > 0.15 and kept.max() > 0.8 and 0.4 < kept.mean() < 0.75


def test_random_erasing_makes_a_rectangle_gray(image):
    changed = erase.augment(image, draws())
    is_gray = (changed == 0).all(1)
    share = is_gray.float().mean((1, 2))
    assert (
        share.min() > 0.01
        and share.max() < 0.36
        and (changed == image)[~is_gray[:, None].expand_as(image)].all()
    )
    for one in is_gray:
        rows, columns = one.any(1), one.any(0)
        assert (one == (rows[:, None] & columns)).all()


def test_a_gaussian_blur_has_the_deviations_that_its_documentation_states(monkeypatch):
    monkeypatch.setattr(Draws, "between", lambda self, number, low, high: torch.linspace(low, high, COUNT))
    spot = torch.zeros(COUNT, 3, 31, 31)
    spot[:, :, 15, 15] = 1
    of_columns = blur.augment(spot, draws())[:, 0].sum(1)
    deviation = (of_columns @ (torch.arange(31.0) - 15) ** 2).sqrt()
    torch.testing.assert_close(of_columns.sum(1), torch.ones(COUNT))
    assert [round(deviation[end].item(), 2) for end in (0, -1)] == [0.46, 1.85]
