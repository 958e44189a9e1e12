"""Forecast of the memory of runs in stages."""

import pytest
import torch

from facetrain.distributed.world import World
from facetrain.head.build import build_head
from facetrain.plan.backbone_memory import BackboneMemory
from facetrain.plan.forecast import forecast, head_load
from facetrain.plan.head_memory import HeadMemory
from facetrain.run.parts.head import head_run
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.training.teacher_cache import DIGESTS, new_cache
from tests.unit.plan.helpers import small_config

CLASSES = 1001


@pytest.mark.parametrize(("of_section", "of_stage"), [("off", "moving"), ("fixed", "off"), ("off", "off")])
def test_every_stage_has_the_table_of_expectations_that_the_head_allocates(of_section, of_stage):
    stages = [{"until_epoch": 1, "batch_size": 16, "expectations": of_stage}]
    described = small_config(
        head={"expectations": of_section}, train={"batch_size": 4, "epochs": 4, "stages": stages}
    )
    world = World(0, 0, 1, 1, torch.device("cpu"))
    head = build_head(
        described.head,
        described.optim,
        head_run(described, world, schedule_steps(described, 1000, 1)),
        world,
        embedding_size=8,
        num_classes=CLASSES,
    )
    tables = head.row_state()
    allocated = sum(tables[name].nbytes for name in tables.keys() & {"weight", "expectation"})
    needed = forecast(described, CLASSES, 1)
    assert (needed.parts["centers"], needed.batch) == (allocated, 16)


@pytest.mark.parametrize(("of_section", "of_stage"), [(0.1, 1.0), (1.0, 0.1)])
def test_a_run_in_stages_needs_the_memory_of_its_largest_stage(of_section, of_stage):
    def needed(rate, **train):
        # The gradient of several micro-batches has the rows of all sampled classes.
        return forecast(
            small_config(
                head={"sample_rate": rate}, optim={"accumulate": 2}, train={"batch_size": 4} | train
            ),
            100 * CLASSES,
            1,
        )

    stages = [{"until_epoch": 1, "sample_rate": of_stage}]
    assert needed(of_section, epochs=4, stages=stages) == needed(1.0) != needed(0.1)


@pytest.mark.parametrize(("of_section", "of_stage"), [(4, 16), (16, 4)])
def test_the_largest_batch_describes_a_run_whose_verification_needs_most(of_section, of_stage):
    stages = [{"until_epoch": 1, "batch_size": of_stage}]
    described = small_config(
        train={"batch_size": of_section, "epochs": 4, "stages": stages},
        eval={"targets": ["lfw"], "batch_size": 4096},
    )
    needed = forecast(described, CLASSES, 1)
    assert needed.parts["verification"] > 0 and needed.batch == 16


def test_sampled_rows_of_the_hosts_memory_are_counted_where_the_prefetcher_keeps_them():
    head = {"sample_rate": 0.1, "placement": "host"}
    on_host = forecast(small_config(head=head), CLASSES, 1)
    on_device = forecast(small_config(head=head | {"placement": "device"}), CLASSES, 1)
    tables = on_device.parts["centers"] + on_device.parts["center_moments"]
    assert on_host.elsewhere == tables and on_host.parts["centers"] == pytest.approx(0.3 * tables, rel=0.01)
    assert on_host.parts["center_moments"] == on_device.elsewhere == 0
    several = forecast(small_config(head=head, optim={"accumulate": 2}), CLASSES, 1)
    assert several.parts["centers"] == 0, "each micro-batch reads its rows"


@pytest.mark.parametrize(("placement", "background"), [("device", True), ("device", False), ("host", True)])
def test_the_copy_of_a_checkpoint_has_the_tables_of_the_device(placement, background):
    config = small_config(head={"placement": placement}, checkpoint={"async": background})
    needed = forecast(config, CLASSES, 2)
    tensors = sum(needed.parts[name] for name in ("weights", "moments", "centers", "center_moments"))
    assert needed.checkpoint_copy == (tensors if placement == "device" and background else 0)


def test_gradients_exist_before_the_backward_pass_of_a_second_micro_batch():
    one, two, ranks, both = (
        forecast(small_config(optim={"accumulate": n}), CLASSES, gpus, batch=4).parts["gradients"]
        for n, gpus in ((1, 1), (2, 1), (1, 2), (2, 2))
    )
    assert one == 0 and two == ranks == both > 0


@pytest.mark.parametrize(("optim", "numbers"), [({"momentum": 0}, 0), ({"name": "adamw"}, 2), ({}, 1)])
def test_muon_keeps_one_number_for_each_of_its_weights(optim, numbers):
    plain = forecast(small_config(optim=optim), CLASSES, 1).parts["moments"]
    muon = forecast(small_config(optim=optim | {"muon": {"lr": 0.02}}), CLASSES, 1).parts["moments"]
    weights = forecast(small_config(), CLASSES, 1).parts["moments"]
    assert plain == numbers * weights
    assert {0: 0 < muon < weights, 1: muon == weights, 2: weights < muon < plain}[numbers]


def test_the_centers_of_a_teacher_have_no_expectations(tmp_path, web_server, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with new_cache(tmp_path / "c.safetensors", (3, 1, 8), dict.fromkeys(DIGESTS, "")):
        pass
    web_server.files["/c.safetensors"] = (tmp_path / "c.safetensors").read_bytes()
    distill = {"teacher": "t", "cache": f"{web_server.address}/c.safetensors", "loss": "fixed_centers"}
    found = [
        forecast(small_config(head={"expectations": "moving"}, distill=teacher), CLASSES, 1).parts["centers"]
        for teacher in (None, distill)
    ]
    assert found == [2 * CLASSES * 8 * 4, 3 * CLASSES * 8 * 4]
    on_host = small_config(head={"placement": "host"}, distill=distill)
    assert forecast(on_host, CLASSES, 1).elsewhere == 3 * CLASSES * 8 * 4, (
        "centers, moments and the teacher's centers"
    )


def test_a_gpu_computes_in_bf16_unless_the_config_says_otherwise():
    auto, bf16, fp32 = (
        forecast(small_config(train={"batch_size": 4, "precision": precision}), CLASSES, 1).parts[
            "activations"
        ]
        for precision in ("auto", "bf16", "fp32")
    )
    assert auto == bf16 < fp32


@pytest.mark.parametrize(
    ("head", "work"),
    [
        (HeadMemory(100, 50, peak=700, accumulated=0, update=0), 700),
        # The backward pass of the backbone, beside the gradient of the centers.
        (HeadMemory(100, 50, peak=10, accumulated=30, update=0), 1500 - 1000 + 30),
        # The update, in place of the activations.
        (HeadMemory(100, 50, peak=10, accumulated=30, update=1900), 1900 - 1000),
    ],
)
def test_a_forecast_is_of_the_worst_moment_of_a_step_or_of_verification(head, work, monkeypatch):
    backbone = BackboneMemory(parameters=10, hidden=0, state_bytes=40, kept=1000, peak=1500)
    module = "facetrain.plan.forecast"
    monkeypatch.setattr(f"{module}.head_memory", lambda load: head)
    monkeypatch.setattr(f"{module}.backbone_memory", lambda *_, **__: backbone)
    monkeypatch.setattr(f"{module}.forward_bytes", lambda *_, **__: 10_000)
    needed, verified = (
        forecast(small_config(eval={"targets": targets, "batch_size": 16}), CLASSES, 1)
        for targets in ([], ["lfw"])
    )
    assert needed.parts["work"] == work and needed.parts["verification"] == 0
    assert needed.parts["images"] == 4 * 32 * 32 * 3 * (2 + 4 + 4)
    # Three copies in bytes, and images and mirror images in float32.
    images = 16 * 32 * 32 * 3 * (3 + 8)
    step = ("images", "activations", "work")
    assert sum(verified.parts[name] for name in (*step, "verification")) == images + 10_000
    assert needed.fits(round(needed.total / 0.9) + 1) and not needed.fits(round(needed.total / 0.9) - 1)


def test_the_images_of_all_micro_batches_of_a_step_are_loaded_at_once():
    for count in (1, 8):
        images = forecast(small_config(optim={"accumulate": count}), CLASSES, 1).parts["images"]
        assert images == 4 * 32 * 32 * 3 * (2 * count + 4 + 4)


def test_the_head_gathers_the_images_of_all_gpus_for_the_classes_of_one():
    load = head_load(small_config(), CLASSES, 4, 8, ())
    assert (load.rows, load.local_batch, load.global_batch, load.product_dtype) == (251, 8, 32, None)
    assert (
        head_load(small_config(train={"precision": "bf16"}), CLASSES, 4, 8, ()).product_dtype
        == torch.bfloat16
    )
