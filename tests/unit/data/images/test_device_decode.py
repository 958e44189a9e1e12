"""Decoding of whole batches with the CPU as the device: the calls to torchvision and DALI are the same."""

import importlib.util

import numpy as np
import pytest
import torch

from facetrain.data.formats.record_writer import write_identities
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
HAS_DALI = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"))
DECODERS = [
    "gpu",
    pytest.param("dali", marks=pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed")),
]


def jpeg(number, size=SIZE):
    ramp = np.linspace(0, 200, size)[:, None, None] + np.array([number * 5 % 50, 0, 30])
    return encode_jpeg(np.broadcast_to(ramp, (size, size, 3)).astype(np.uint8), 90)


def write(folder, encoded):
    write_identities(folder, [len(encoded)], [(0, data) for data in encoded], SIZE)
    return open_dataset(folder)


def loaded(dataset, *, decode="gpu", workers=1, bad_records="error"):
    sampler = GlobalSampler(dataset.num_images, SampleOrder(seed=1, global_batch_size=dataset.num_images))
    settings = LoaderSettings(
        DataSettings(train="", image_size=SIZE, bad_records=bad_records, decode=decode),
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


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_jpegs_of_the_right_size_and_other_images_decode_to_the_same_pixels(tmp_path, decode, workers):
    encoded = [jpeg(0), encoded_image(1, SIZE), jpeg(2, 48), jpeg(3), encoded_image(4, 16)]
    dataset = write(tmp_path, encoded)
    images, _ = loaded(dataset, decode=decode, workers=workers)
    for number in (0, 1, 3):
        assert (images[number] == decode_rgb(encoded[number], location="x")).all()
    assert images[2].shape == images[4].shape == (SIZE, SIZE, 3)


def damaged():
    """A JPEG with valid start and end markers and damaged content."""
    data = bytearray(jpeg(7))
    start = data.index(b"\xff\xc4")
    data[start + 2 : start + 6] = b"\xff\xff\xff\xff"
    return bytes(data)


@pytest.mark.parametrize("decode", DECODERS)
def test_an_image_that_the_device_refuses_is_reported_or_replaced_by_the_host(tmp_path, decode):
    dataset = write(tmp_path, [jpeg(0), damaged(), jpeg(2)])
    with pytest.raises(ImageError, match="key 2 at byte"):
        loaded(dataset, decode=decode)
    images, skipped = loaded(dataset, decode=decode, bad_records="skip")
    assert len(skipped) == 1 and "key 2 at byte" in skipped[0]
    assert (images[1] == decode_rgb(jpeg(2), location="x")).all()
    assert (images[0] == decode_rgb(jpeg(0), location="x")).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_cannot_decode_is_refused_at_startup():
    with pytest.raises(DataError, match="data.decode: gpu: torchvision cannot decode JPEG on cuda"):
        build_decoder("gpu", torch.device("cuda"), batch_size=1, threads=1)


@pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed")
def test_dali_continues_after_a_refused_image():
    decode = build_decoder("dali", torch.device("cpu"), batch_size=4, threads=1)
    good, bad = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (jpeg(1), damaged()))
    with pytest.raises(RuntimeError):
        decode([good, bad])
    for count in (1, 4, 2):
        image_BHWC = decode([good] * count)
        assert image_BHWC.shape == (count, SIZE, SIZE, 3)
        assert (image_BHWC.numpy() == decode_rgb(jpeg(1), location="x")).all()


@pytest.mark.skipif(HAS_DALI, reason="DALI is installed")
def test_without_dali_the_error_names_the_package_to_install():
    with pytest.raises(
        DataError, match=r"data.decode: dali: .* not installed; `pip install facetrain\[dali\]`"
    ):
        build_decoder("dali", torch.device("cpu"), batch_size=1, threads=1)
