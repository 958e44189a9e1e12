import errno
import os
import shutil
import sys

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.config.loading import build_config
from facetrain.data.settings import DataSettings
from facetrain.doctor.check_result import errors_as_failures
from facetrain.doctor.dataset import check_dataset
from facetrain.doctor.disk import check_disk
from facetrain.doctor.machine import check_machine, check_network, check_software
from facetrain.doctor.run_checks import check_checkpoints, check_learning_rate, check_memory, checkpoint_bytes
from facetrain.errors import DataError
from facetrain.optim.settings import OptimSettings
from facetrain.plan.forecast import forecast
from tests.support.datasets import damage_records, write_records
from tests.support.snapshots import snapshot


def check_data(folder, **values):
    return check_dataset(DataSettings(train=str(folder), **{"image_size": 16} | values))


def statuses(results):
    return {result.check: result.status for result in results}


def run_check(name, check, *args, **options):
    results = []
    with errors_as_failures(results, name):
        results += check(*args, **options)
    return results


def test_the_packages_of_this_environment_match_and_its_cores_are_compared_with_the_processes():
    assert set(statuses(check_software())) == {"torch", "cuda"}
    assert "failure" not in statuses(check_software()).values()
    assert statuses(check_machine(100_000, "fp32"))["host"] == "warning"


def test_a_torchvision_for_another_torch_is_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # the import fails
    torch_check = check_software()[0]
    assert torch_check.status == "failure" and "one index" in torch_check.advice


def test_storage_that_renames_no_folder_is_a_failure(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("os.rename", refuse)  # as mounts of object stores do
    result = list(check_disk(tmp_path))[-1]
    assert (result.check, result.status) == ("disk renames", "failure")
    assert "not implemented" in result.message


def test_a_disk_with_enough_space_passes_and_a_full_one_is_a_failure(tmp_path):
    config = build_config({"data": {"train": "none"}, "checkpoint": {"every_steps": 1, "keep": 3}}, "test")
    results = list(check_disk(tmp_path / "runs" / "new", config, checkpoint_bytes=1000, steps=9))
    assert statuses(results) == {"disk space": "ok", "disk renames": "ok"}
    assert "a checkpoint takes 0.00 GiB" in results[0].message
    assert list(tmp_path.iterdir()) == []
    free = shutil.disk_usage(tmp_path).free
    few, *_ = check_disk(tmp_path, config, checkpoint_bytes=free // 2, steps=9)
    (full,) = run_check("disk", check_disk, tmp_path, config, checkpoint_bytes=2 * free, steps=9)
    assert (few.status, full.status) == ("warning", "failure") and "4 checkpoints" in few.message


def test_a_good_dataset_passes(tmp_path):
    results, source = check_data(write_records(tmp_path, [0, 0, 1, 2, 2], size=16))
    assert set(statuses(results).values()) == {"ok"} and source.num_images == 5
    assert "5 images of 3 identities, 1 to 2 of each" in results[0].message


def test_missing_labels_and_other_image_sizes_are_warnings(tmp_path):
    results, _ = check_data(write_records(tmp_path, [0, 0, 5, 5], size=20))
    assert statuses(results) == {"dataset": "ok", "identities": "warning", "images": "warning"}
    assert "4 labels below the highest" in results[1].message and "20 × 20" in results[2].message


def test_unreadable_images_are_a_failure_that_names_the_first(tmp_path):
    folder = write_records(tmp_path, [0, 0, 1, 1])
    damage_records(folder / "train.rec", (1,))
    results, _ = check_data(folder)
    assert (
        results[-1].status == "failure"
        and "1 of 4" in results[-1].message
        and "train.rec" in results[-1].message
    )


def test_unreadable_images_that_training_skips_are_a_warning(tmp_path):
    folder = write_records(tmp_path, [0, 0, 1, 1])
    damage_records(folder / "train.rec", (1,))
    results, _ = check_data(folder, bad_records="skip")
    assert results[-1].status == "warning" and "training skips them" in results[-1].message
    assert "bad_records" not in results[-1].advice, "it is set already"
    damage_records(folder / "train.rec", (0, 1, 2, 3))
    results, _ = check_data(folder, bad_records="skip")
    assert results[-1].status == "failure"


def test_an_error_in_a_check_becomes_a_failure(tmp_path):
    (result,) = run_check("dataset", check_data, tmp_path / "none")
    assert result.status == "failure" and "no such folder" in result.message
    write_records(tmp_path, [0, 1])
    with pytest.raises(DataError, match="num_classes is 3"):
        check_data(tmp_path, num_classes=3)


@pytest.mark.parametrize(
    ("optimizer", "lr", "batch", "status", "trained"),
    [
        ("sgd", 0.1, 1024, "ok", False),
        ("sgd", 0.02, 128, "ok", False),
        ("sgd", 0.6, 8192, "ok", False),
        ("sgd", 0.1, 512, "ok", False),
        ("sgd", 0.1, 128, "warning", False),
        ("sgd", 0.1, 8192, "warning", False),
        ("adamw", 0.001, 24_576, "ok", False),
        ("adamw", 0.1, 1024, "warning", False),
        ("sgd", 0.001, 1024, "ok", True),
    ],
)
def test_learning_rates_are_compared_with_published_ones_unless_weights_are_trained(
    optimizer, lr, batch, status, trained
):
    result = check_learning_rate(OptimSettings(name=optimizer, lr=lr), batch, has_initial_weights=trained)
    assert result.status == status


def test_sizes_of_memory_and_checkpoints_come_from_the_forecast():
    model = {"backbone": "mbf", "embedding_size": 64}
    config = build_config({"data": {"train": "none"}, "model": model, "eval": {"targets": []}}, "test")
    needed = forecast(config, 1001, 2)
    parameters = sum(p.numel() for p in build_backbone("mbf", embedding_size=64).parameters())
    # Batch norm's statistics are saved too; the larger shard counts twice.
    assert (
        8 * parameters + 1001 * 64 * 8 < checkpoint_bytes(needed, 2) < 1.05 * (8 * parameters + 1002 * 64 * 8)
    )
    memory = [needed.total - 1, needed.total + 1, 2 * needed.total]
    assert [check_memory(needed, size).status for size in memory] == ["failure", "warning", "ok"]


def test_the_network_of_one_process_is_not_measured():
    result = check_network(torch.device("cpu"))
    assert result.status == "ok" and "torchrun" in result.message


def test_checkpoints_are_verified_and_damage_is_a_failure(tmp_path):
    assert statuses(check_checkpoints(tmp_path)) == {"checkpoints": "warning"}
    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, asynchronous=False)
    for step in (1, 2):
        writer.save(snapshot(step))
    assert [result.status for result in check_checkpoints(tmp_path)] == ["ok", "ok"]
    os.truncate(folder / "step_00000001" / "replicated.safetensors", 10)
    writer.save(snapshot(3))
    (folder / ".step_00000004.tmp-00000000").mkdir()
    results = list(check_checkpoints(tmp_path))
    assert [f.status for f in results] == ["failure", "ok", "ok", "warning"]
    assert "(10 of 168 bytes)" in results[0].message and ".step_00000004" in results[3].message
