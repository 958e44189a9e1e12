"""A network, its training step and its loader, as a run gives them to callbacks."""

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.augment import Augment
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import SampleOrder, build_sampler
from facetrain.data.open_dataset import open_dataset
from facetrain.head.build import HeadRun, build_head
from facetrain.head.settings import HeadSettings
from facetrain.optim.build import build_optimizer
from facetrain.optim.loss_scale import LossScale
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.optim.stepper import Stepper
from facetrain.training.precision import InPrecision
from facetrain.training.state import TrainState
from facetrain.training.step import TrainStep
from tests.support.datasets import write_records
from tests.support.world import ONE_RANK
from tests.unit.run.callbacks.helpers import BATCH, CLASSES, CPU, SIZE


@pytest.fixture
def state():
    torch.manual_seed(0)
    options = {"layers": (1, 1, 1, 1), "widths": (4, 4, 4, 4), "embedding_size": 8, "image_size": SIZE}
    backbone = build_backbone("iresnet", **options)
    network = InPrecision(backbone, "fp32", CPU, memory_format=torch.contiguous_format)
    settings = HeadSettings(), OptimSettings()
    head = build_head(*settings, HeadRun(), ONE_RANK, embedding_size=8, num_classes=CLASSES)
    optimizer = build_optimizer(OptimSettings(weight_decay=0), parameter_groups(backbone, {}))
    scale = LossScale(CPU, enabled=False)
    stepper = Stepper(backbone, [optimizer], head, scale, schedule=lambda step: 0.01, clip_grad_norm=5.0)
    return TrainState(ONE_RANK, network, head, stepper)


@pytest.fixture
def step(state):
    return TrainStep(state.network, Augment(0), max_skipped_steps=3)


@pytest.fixture
def loader(tmp_path):
    """Loader of four steps."""
    write_records(tmp_path / "data", [n // 6 for n in range(BATCH * CLASSES)], size=SIZE)
    source = open_dataset(tmp_path / "data")
    order = build_sampler(source, SampleOrder(seed=0, global_batch_size=BATCH, mode="full"))
    settings = LoaderSettings(BATCH, SIZE, workers=0)
    loader = Loader(source, order, settings, ONE_RANK, stop_step=4)
    yield loader
    loader.close()
