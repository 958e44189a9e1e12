import pytest
import torch
import torch.nn.functional as F

from facetrain import own_parts
from facetrain.counter_rng import uniform
from facetrain.data.augmentations.build import build_augment
from facetrain.data.images.augment import Augment, OwnAugment
from facetrain.data.images.normalize import BufferPool, normalize
from facetrain.data.settings import AugmentSettings
from facetrain.errors import ConfigError
from tests.support.fake_gpu import GPU, fake_gpu


def test_a_buffer_is_used_again_as_soon_as_nothing_refers_to_it():
    buffers = BufferPool()
    first = buffers.array((4, 2))
    address = first.ctypes.data
    held = torch.from_numpy(first)[1:]
    del first
    assert buffers.array((4, 2)).ctypes.data != address
    del held
    assert address in {buffers.array((4, 2)).ctypes.data for _ in range(2)}
    assert buffers.array((2, 4)).shape == (2, 4)


def images(count=6):
    return torch.randint(
        0, 256, (count, 20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


ALL = {name: 0.5 for name in ("flip", *AugmentSettings().probabilities())}


def test_normalized_pixels_lie_between_minus_one_and_one_in_channels_last():
    image = normalize(torch.tensor([0, 255, 127], dtype=torch.uint8).expand(1, 2, 2, 3).contiguous())
    assert image[0, :, 0, 0].tolist() == pytest.approx([-1, 1, -1 / 255], abs=1e-6)
    assert image.is_contiguous(memory_format=torch.channels_last)


def brighter(image, key):
    return image + uniform(key, 0).float().view(-1, 1, 1, 1)


OWN = OwnAugment("data.augment.own[0]: m:f", 0.5, brighter)


def test_augmentation_depends_on_seed_epoch_and_index_only():
    augment = build_augment(1, AugmentSettings(**ALL))
    sample = torch.arange(6)
    whole = augment(images(), sample, 3)
    parts = torch.cat([augment(images()[rows], sample[rows], 3) for rows in ([0, 1], [2], [3, 4, 5])])
    torch.testing.assert_close(whole, parts)
    assert not torch.equal(whole, augment(images(), sample, 4))
    assert not torch.equal(whole, build_augment(2, AugmentSettings(**ALL))(images(), sample, 3))


@pytest.mark.parametrize(
    "augment", [build_augment(0, AugmentSettings(flip=0, color=0.5)), Augment(0, 0, own=[OWN])]
)
def test_every_epoch_chooses_other_images_and_draws_anew(augment):
    many, number = images(100), torch.arange(100)
    first, second = (augment(many, number, epoch) for epoch in (0, 1))
    chosen, later = ((found != normalize(many)).flatten(1).any(1) for found in (first, second))
    assert not torch.equal(chosen, later)
    both = chosen & later
    assert (first[both] != second[both]).flatten(1).any(1).all()


@pytest.mark.parametrize("name", list(ALL))
def test_each_augmentation_changes_images_with_its_probability(name):
    many = images(400)
    off = {"flip": 0.0}
    plain = build_augment(0, AugmentSettings(**off))(many, torch.arange(400), 0)
    changed = build_augment(0, AugmentSettings(**(off | {name: 0.25})))(many, torch.arange(400), 0)
    share = (changed != plain).flatten(1).any(1).float().mean().item()
    assert 0.17 < share < 0.33
    assert changed.min() >= -1.0001 and changed.max() <= 1.0001 and changed.shape == plain.shape


def test_low_resolution_keeps_the_means_of_areas_of_the_given_size():
    many = images(100)
    augment = build_augment(0, AugmentSettings(flip=0, low_resolution=1.0, low_resolution_sizes=[4, 5]))
    small = [F.interpolate(normalize(many), (size, size), mode="area") for size in (4, 5)]
    expected = [F.interpolate(one, (20, 20), mode="bilinear") for one in small]
    changed = augment(many, torch.arange(100), 0)
    counts = [
        sum(torch.allclose(a, b, atol=1e-5) for a, b in zip(changed, one, strict=True)) for one in expected
    ]
    assert sum(counts) == 100 and min(counts) > 35


def test_flip_mirrors_and_gray_has_equal_channels():
    plain = normalize(images())
    torch.testing.assert_close(
        build_augment(0, AugmentSettings(flip=1.0))(images(), torch.arange(6), 0), plain.flip(3)
    )
    gray = build_augment(0, AugmentSettings(flip=0, gray=1.0))(images(), torch.arange(6), 0)
    torch.testing.assert_close(gray[:, 0], gray[:, 2])


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda image, key: image[0], r"shape \(3, 20, 20\) and torch.float32"),
        (lambda image, key: image[:1], r"shape \(1, 3, 20, 20\)"),
        (lambda image, key: image.mean(), r"shape \(\)"),
        (lambda image, key: image.double(), "float64"),
        (lambda image, key: None, "NoneType"),
    ],
)
def test_an_own_augmentation_must_return_images_of_the_same_shape_and_dtype(function, found):
    augment = Augment(0, own=[OwnAugment("data.augment.own[0]: m:f", 1.0, function)])
    with pytest.raises(
        ConfigError, match=rf"own\[0\]: m:f maps .*\(6, 3, 20, 20\) .* to .*{found}.*; return"
    ):
        augment(images(), torch.arange(6), 0)


def test_an_own_augmentation_gets_its_keys_on_the_device_of_the_images():
    augment = Augment(0, own=[OWN])
    expected = augment(images(), torch.arange(6), 0)
    with fake_gpu() as gpu:
        on_gpu = augment(images().to(GPU), torch.arange(6), 0)
    torch.testing.assert_close(on_gpu.content, expected)
    assert not gpu.faults


def test_no_augmentation_lets_the_host_wait_for_the_device():
    count = 4
    augment = build_augment(0, AugmentSettings(**dict.fromkeys(ALL, 1.0)))
    with fake_gpu() as gpu:
        augment(torch.zeros(count, 112, 112, 3, dtype=torch.uint8, device=GPU), torch.arange(count), 0)
    assert not gpu.faults and not gpu.waits
    # The driver may wait from 64 KiB on: batches of 512 images stay below.
    assert max(gpu.pageable[-1].values()) < 64 * 1024 * count / 512


def test_an_own_augmentation_is_refused_for_options_that_it_lacks(monkeypatch):
    monkeypatch.setattr(own_parts, "_allowed", {__name__ + ":brighter"})
    own = {"type": __name__ + ":brighter", "options": {"bye": 0.1}}
    with pytest.raises(ConfigError, match=r"^data.augment.own\[0\]: .*:brighter: .*'by'"):
        build_augment(0, AugmentSettings(own=[own]))


def test_an_own_augmentation_may_be_a_builtin_whose_arguments_are_unknown(monkeypatch):
    monkeypatch.setattr(own_parts, "_allowed", {"torch:maximum"})
    build_augment(0, AugmentSettings(own=[{"type": "torch:maximum"}]))


def brighter(image, key, *, by):
    return image + by
