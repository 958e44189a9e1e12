"""Decoding of whole batches with the CPU as the device: the calls to torchvision are the same."""

import numpy as np
import pytest
import torch

from facetrain.data.formats.recordio import write_identities
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.images.device_decode import build_decoder
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder
from facetrain.data.open_dataset import open_dataset
from facetrain.data.settings import DataSettings
from facetrain.errors import DataError, ImageError
from tests.support.datasets import encoded_image
from tests.support.world import ONE_RANK

SIZE = 32


def jpeg(number, size=SIZE):
    ramp = np.linspace(0, 200, size)[:, None, None] + np.array([number * 5 % 50, 0, 30])
    return encode_jpeg(np.broadcast_to(ramp, (size, size, 3)).astype(np.uint8), 90)


def write(folder, encoded):
    write_identities(folder, [len(encoded)], [(0, data) for data in encoded], SIZE)
    return open_dataset(folder)


def loaded(dataset, *, workers=1, bad_records="error"):
    sampler = GlobalSampler(dataset.num_images, SampleOrder(seed=1, global_batch_size=dataset.num_images))
    settings = LoaderSettings(
        DataSettings(train="", image_size=SIZE, bad_records=bad_records, decode="gpu"),
        dataset.num_images,
        workers=workers,
    )
    loader = Loader(dataset, sampler, settings, ONE_RANK, stop_step=1)
    try:
        ((batch,),) = list(loader)
    finally:
        loader.close()
    images = dict(zip(batch.sample_B.tolist(), batch.image_BHWC.numpy(), strict=True))
    return images, loader.skipped


@pytest.mark.parametrize("workers", [0, 1])
def test_jpegs_of_the_right_size_and_other_images_decode_to_the_same_pixels(tmp_path, workers):
    encoded = [jpeg(0), encoded_image(1, SIZE), jpeg(2, 48), jpeg(3), encoded_image(4, 16)]
    dataset = write(tmp_path, encoded)
    images, _ = loaded(dataset, workers=workers)
    for number in (0, 1, 3):
        assert (images[number] == decode_rgb(encoded[number], location="x")).all()
    assert images[2].shape == images[4].shape == (SIZE, SIZE, 3)


def damaged():
    """A JPEG with valid start and end markers and damaged content."""
    data = bytearray(jpeg(7))
    start = data.index(b"\xff\xc4")
    data[start + 2 : start + 6] = b"\xff\xff\xff\xff"
    return bytes(data)


def test_an_image_that_the_device_refuses_is_reported_or_replaced_by_the_host(tmp_path):
    dataset = write(tmp_path, [jpeg(0), damaged(), jpeg(2)])
    with pytest.raises(ImageError, match="key 2 at byte"):
        loaded(dataset)
    images, skipped = loaded(dataset, bad_records="skip")
    assert len(skipped) == 1 and "key 2 at byte" in skipped[0]
    assert (images[1] == decode_rgb(jpeg(2), location="x")).all()
    assert (images[0] == decode_rgb(jpeg(0), location="x")).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_cannot_decode_is_refused_at_startup():
    with pytest.raises(DataError, match="data.decode: gpu: torchvision cannot decode JPEG on cuda"):
        build_decoder(torch.device("cuda"))
