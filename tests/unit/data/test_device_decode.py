"""Decoding on the device, with the CPU as the device: torchvision's decoder is the same call there."""

import numpy as np
import pytest
import torch

from facetrain.data.dataset import open_source
from facetrain.data.decode import decode_rgb, encode_jpeg
from facetrain.data.device_decode import DeviceDecoder
from facetrain.data.loader import Loader
from facetrain.data.order import GlobalOrder
from facetrain.data.records import write_identities
from facetrain.data.worker import Filler, Slots
from facetrain.errors import DataError, ImageError
from tests.support.datasets import picture

SIZE = 32


def jpeg(number, size=SIZE):
    ramp = np.linspace(0, 200, size)[:, None, None] + np.array([number * 5 % 50, 0, 30])
    return encode_jpeg(np.broadcast_to(ramp, (size, size, 3)).astype(np.uint8), 90)


def write(folder, pictures):
    write_identities(folder, [len(pictures)], [(0, data) for data in pictures], SIZE)
    return open_source(folder)


def loaded(source, *, workers=1, bad_records="error"):
    order = GlobalOrder(source.num_images, seed=1, global_batch_size=source.num_images)
    loader = Loader(
        source, order, rank=0, world_size=1, local_batch_size=source.num_images, workers=workers,
        image_size=SIZE, decode_on_device=True, bad_records=bad_records, stop_step=1,
    )  # fmt: skip
    try:
        ((batch,),) = list(loader)
    finally:
        loader.close()
    images = dict(zip(batch.sample_B.tolist(), batch.image_BHWC.numpy(), strict=True))
    return images, loader.skipped


@pytest.mark.parametrize("workers", [0, 1])
def test_jpegs_of_the_right_size_and_all_others_become_the_same_pixels(tmp_path, workers):
    pictures = [jpeg(0), picture(1, SIZE), jpeg(2, 48), jpeg(3), picture(4, 16)]
    source = write(tmp_path, pictures)
    images, _ = loaded(source, workers=workers)
    for number in (0, 1, 3):
        assert (images[number] == decode_rgb(pictures[number], where="x")).all()
    assert images[2].shape == images[4].shape == (SIZE, SIZE, 3)


def damaged():
    """A JPEG whose ends are right and whose middle is not."""
    data = bytearray(jpeg(7))
    start = data.index(b"\xff\xc4")
    data[start + 2 : start + 6] = b"\xff\xff\xff\xff"
    return bytes(data)


def test_what_the_device_refuses_is_named_or_skipped_by_the_host(tmp_path):
    source = write(tmp_path, [jpeg(0), damaged(), jpeg(2)])
    with pytest.raises(ImageError, match="key 2 at byte"):
        loaded(source)
    images, skipped = loaded(source, bad_records="skip")
    assert len(skipped) == 1 and "key 2 at byte" in skipped[0]
    assert (images[1] == decode_rgb(jpeg(2), where="x")).all()
    assert (images[0] == decode_rgb(jpeg(0), where="x")).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device that can")
def test_a_device_that_cannot_decode_is_refused_at_the_start(tmp_path):
    slots = Slots(1, 1, SIZE)
    with pytest.raises(DataError, match="data.decode: gpu: torchvision cannot decode JPEG on cuda"):
        DeviceDecoder(slots, Filler(write(tmp_path, [jpeg(0)]), slots, skip=False), torch.device("cuda"))
