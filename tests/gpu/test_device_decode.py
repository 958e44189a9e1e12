"""Batches decoded by nvJPEG, through torchvision or DALI, compared with those of the CPU."""

import importlib.util

import pytest
import torch

from facetrain.bench.generated_dataset import open_or_generate
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder
from facetrain.data.settings import DataSettings
from facetrain.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


HAS_DALI = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"))
DECODERS = [
    "gpu",
    pytest.param("dali", marks=pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed")),
]


def batches(dataset, decode):
    sampler = GlobalSampler(dataset.num_images, SampleOrder(seed=1, global_batch_size=128))
    settings = LoaderSettings(DataSettings(train="", decode=decode), local_batch_size=128)
    loader = Loader(dataset, sampler, settings, World(0, 0, 1, 1, torch.device("cuda")), stop_step=8)
    found = [(batch.image_BHWC.clone(), batch.label_B.clone()) for (batch,) in loader]
    loader.close()
    return found


@pytest.mark.parametrize("decode", DECODERS)
def test_nvjpeg_decodes_the_same_images_as_the_cpu(decode):
    with open_or_generate(None) as dataset:
        for (ours, label), (theirs, expected) in zip(
            batches(dataset, decode), batches(dataset, "cpu"), strict=True
        ):
            assert torch.equal(label, expected)
            difference = (ours.float() - theirs.float()).abs()
            assert difference.mean() < 2 and difference.flatten(1).mean(1).max() < 4
