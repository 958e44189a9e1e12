"""Steps of the head on a fake GPU: no mixed devices, and no copy that blocks the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from facetrain.config.schema import Config
from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import UsageError
from facetrain.head.class_chunk import FusedChunk
from facetrain.head.partial_fc import PartialFC
from facetrain.head.sampling import Stage
from facetrain.run.parts.head import build_head
from facetrain.run.parts.step_schedule import schedule_steps
from tests.support.fake_gpu import GPU, fake_gpu
from tests.support.heads import head_step, make_head, margin_settings

OTHER_MARGINS = ("combined", "adaface", "magface", "curricularface", "elastic_cosface")
OPTIONS = {
    "softmax": {},
    "products in bfloat16": {"product_dtype": torch.bfloat16},
    "no momentum": {"momentum": 0.0},
    "adamw": {"optimizer": "adamw"},
    "16 and 8 bits": {"weight_dtype": torch.bfloat16, "momentum_dtype": torch.int8},
    "accumulated": {"update_in_backward": False},
    "expectations": {"stages": (Stage(0, 1.0, "moving"),)},
    "sampled, expectations": {"stages": (Stage(0, 0.2, "moving"),)},
    "sampled": {"sample_rate": 0.2},
    "sampled, 16 bits": {"sample_rate": 0.2, "weight_dtype": torch.bfloat16},
    "sampled, accumulated": {"sample_rate": 0.2, "update_in_backward": False},
    "not trained": {"trained": False, "update_in_backward": False},
    "sampled, not trained": {"sample_rate": 0.2, "trained": False, "update_in_backward": False},
    "sampled on the host, not trained": {
        "sample_rate": 0.2,
        "placement": "host",
        "trained": False,
        "update_in_backward": False,
    },
}
CASES = [*((name, "arcface") for name in OPTIONS), *(("softmax", margin) for margin in OTHER_MARGINS)]


@pytest.mark.parametrize(("name", "margin"), CASES)
def test_a_step_mixes_no_devices_and_never_blocks_the_host(name, margin):
    with fake_gpu(capability=(7, 0)) as gpu:
        head = make_head(
            embedding_size=32, num_classes=500, margin=margin_settings(margin), weight_decay=1e-4, device=GPU,
            chunk_size=128, **OPTIONS[name],
        )  # fmt: skip
        head_step(head, 0)  # the first step moves running averages to the device
        gpu.step = 1
        loss, gradient = head_step(head, 1)
    assert loss.device == gradient.device == GPU
    assert not gpu.faults and not gpu.waits[1] and not gpu.pageable[1]


@pytest.mark.parametrize(("capability", "rounds"), [((7, 5), False), ((8, 0), True)])
def test_fp16_rounds_where_the_gpu_is_faster_with_it(capability, rounds):
    embedding, label = torch.randn(4, 32), torch.arange(4)
    with fake_gpu(capability=capability):
        losses = [
            PartialFC("arcface", 32, 500, fp16=fp16, device=GPU)(embedding.to(GPU), label.to(GPU)).item()
            for fp16 in (False, True)
        ]
    assert (losses[0] != losses[1]) == rounds


def test_cuda_without_a_number_is_the_current_gpu_in_the_threads_of_the_head_too():
    with fake_gpu(capability=(7, 0)) as gpu:
        head = make_head(
            embedding_size=32, num_classes=500, sample_rate=0.2, placement="host", device=torch.device("cuda")
        )
        loss, _ = head_step(head, 0)
    assert head.device == loss.device == GPU and not gpu.faults


def test_labels_on_the_host_need_a_backend_for_them(monkeypatch):
    monkeypatch.setattr(collectives, "world_size", lambda group=None: 2)
    monkeypatch.setattr(collectives.dist, "get_backend_config", lambda group: "cuda:nccl")
    with fake_gpu(capability=(7, 0)):
        head = make_head(
            embedding_size=32, num_classes=500, margin=margin_settings("arcface"), sample_rate=0.2, device=GPU
        )
        with pytest.raises(UsageError, match=r'no backend.*init_process_group\("cpu:gloo,cuda:nccl"\)'):
            head.expect_labels(torch.arange(4))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_no_table(optimizer):
    with fake_gpu(capability=(7, 0)):
        head = make_head(
            embedding_size=32, num_classes=50, margin=margin_settings("arcface"), weight_decay=1e-4, device=GPU,
            optimizer=optimizer,
        )  # fmt: skip
        for step in (0, 2):  # also the first step, before any center has one
            before = {name: table.cpu().clone() for name, table in head.row_state().items()}
            head.begin_step(step, lr=0.1)
            embedding = torch.full((16, 32), float("nan"), device=GPU, requires_grad=True)
            head(embedding, torch.arange(16).pin_memory().to(GPU, non_blocking=True)).backward()
            for name, table in head.row_state().items():
                assert torch.equal(table.cpu(), before[name]), name
            head_step(head, step + 1)
            assert not torch.equal(head.row_state()["weight"].cpu(), before["weight"])


@pytest.mark.parametrize("stages", [(), (Stage(0, 0.2, "moving"),)], ids=["sampled", "sampled, expectations"])
def test_micro_batches_with_other_classes_block_the_host_only_to_store_rows_there(
    stages, tmp_path, monkeypatch
):
    monkeypatch.setattr("facetrain.head.settings.CLASSES_PER_READ", 1)  # the same sample in each placement
    on_device, in_memory, on_disk = (train(place, stages, tmp_path) for place in ("device", "host", "disk"))
    for name, table in on_device.items():
        assert torch.equal(table, in_memory[name]) and torch.equal(table, on_disk[name]), name


def train(placement, stages, folder):
    """Train on a fake GPU with three micro-batches a step, check the waits, and return the tables."""
    torch.manual_seed(0)
    with fake_gpu(capability=(7, 0)) as gpu:
        head = make_head(
            embedding_size=32, num_classes=500, sample_rate=0.2, stages=stages, update_in_backward=False, device=GPU,
            chunk_size=64, placement=placement, folder=folder,
        )  # fmt: skip
        for number in range(2):
            gpu.step = number
            head.begin_step(number, lr=0.1)
            for first in (0, 100, 100):  # the last two have the same classes
                label = torch.arange(first, first + 16)
                head.expect_labels(label)
                embedding = torch.randn(16, 32, device=GPU, requires_grad=True)
                head(embedding, label.pin_memory().to(GPU, non_blocking=True)).backward()
            head.step(torch.full((), 3.0, device=GPU), torch.full((), 0.0, device=GPU))
        gpu.step = 2
        tables = {name: table.cpu().clone() for name, table in head.row_state().items()}
    waits = set() if placement == "device" else {"head/class_centers:store copy to the host"}
    assert not gpu.faults and gpu.waits[1] == waits and not gpu.pageable[1]
    return tables


class Products(TorchDispatchMode):
    """Records the dtypes of the factors of every matrix product."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.dtypes.append((args[0].dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "capability", "dtype"),
    [
        ("fp32", (9, 0), torch.float32),
        ("bf16", (9, 0), torch.bfloat16),
        ("fp16", (9, 0), torch.bfloat16),
        ("fp16", (7, 0), torch.float32),  # no tensor cores for bfloat16
    ],
)
def test_the_products_run_in_16_bits_on_gpus_that_are_faster_at_it(
    precision, capability, dtype, monkeypatch, tmp_path
):
    kernels = pytest.importorskip("facetrain.head.kernels.margin_softmax", reason="needs Triton")
    products, found = Products(), []

    def launch(kernel, grid, *arguments, **options):
        if "has_sums" in options:
            found.append((arguments[2].dtype, arguments[3].dtype))

    monkeypatch.setattr(kernels, "launch", launch)
    config = Config.model_validate({"data": {"train": "unused"}, "train": {"precision": precision}})
    world = World(0, 0, 1, 1, GPU)
    with fake_gpu(capability=capability) as gpu, products:
        schedule = schedule_steps(config, 10_000, world.size)
        head = build_head(config, world, 500, tmp_path, schedule=schedule)
        head.loss_scale = torch.empty((), device=GPU)
        gpu.step = 0
        head_step(head, 0)
    is_fused = dtype == torch.bfloat16
    assert len(found) == is_fused and products.dtypes + found == [(dtype, dtype)] * 3
    assert head.chunk_type is (FusedChunk if is_fused else None)
    assert not head._gradient.by_rows(GPU) and not gpu.waits[0], (
        "the gradient of all centers is never collected"
    )
