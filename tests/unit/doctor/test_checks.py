import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from facetrain.config.loading import build_config
from facetrain.data.formats.bin import write_bin
from facetrain.distributed.world import World
from facetrain.doctor.check_result import passed
from facetrain.doctor.examine import examine
from facetrain.doctor.machine import check_machine, check_network
from tests.support.command import ROOT
from tests.support.datasets import damage_records, encoded_image, write_records


def examined(folder, *, targets=(), **values):
    """Return the results of the checks of a dataset by the first word of their names."""
    data = {"train": str(folder), "image_size": 16} | values
    config = build_config({"data": data, "eval": {"targets": list(targets)}}, "test")
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
    return {result.check.split()[0]: result for result in examine(world, config)}


def test_the_packages_of_this_environment_match_and_its_cores_are_compared_with_the_processes():
    statuses = {result.check: result.status for result in check_machine(3, 2, "fp32")}
    assert statuses["torch"] == statuses["cuda"] == "ok" and statuses["host"] == "warning"


@pytest.mark.parametrize(
    ("left", "found"), [(3 << 29, "2 cores and 1.5 GiB of free memory for"), (None, "2 cores for")]
)
def test_the_memory_of_a_machine_is_what_its_container_leaves(monkeypatch, left, found):
    monkeypatch.setattr("facetrain.doctor.machine.available_bytes", lambda: left)
    messages = {result.check: result.message for result in check_machine(3, 2, "fp32")}
    assert messages["host"] == f"{found} 3 processes"


def test_a_torchvision_for_another_torch_is_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # the import fails
    torch_check, *_ = check_machine(1, 1, "fp32")
    assert torch_check.status == "failure" and "one index" in torch_check.advice
    # Without the bounds, a newer torch would take the place of one that facetrain runs with.
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    required = [f"'{Requirement(line)}'" for line in packages if line.startswith("torch")]
    assert len(required) == 2 and torch_check.advice.endswith(" ".join(required))


def test_a_good_dataset_passes(tmp_path):
    results = examined(write_records(tmp_path, [0, 0, 1, 2, 2], size=16))
    assert {results[name].status for name in ("dataset", "identities", "reading", "images")} == {"ok"}
    assert "5 images of 3 identities, 1 to 2 of each" in results["dataset"].message


def test_a_batch_larger_than_the_dataset_is_a_failure(tmp_path):
    result = examined(write_records(tmp_path, [0, 0, 1, 1], size=16))["batch"]
    assert result.status == "failure" and "4 images, fewer than one global batch of 128" in result.message


@pytest.mark.parametrize(("batch_size", "status"), [(4, None), (8, "failure")])
def test_the_batch_is_that_of_as_many_processes_as_a_run_starts(tmp_path, monkeypatch, batch_size, status):
    monkeypatch.setattr("facetrain.doctor.examine.processes_of_host", lambda device: 8)
    data = {"train": str(write_records(tmp_path, [n % 4 for n in range(40)], size=16)), "image_size": 16}
    # As published for 32 images per step.
    values = {"train": {"batch_size": batch_size}, "optim": {"lr": 0.005}, "eval": {"targets": []}}
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"), host_cores=2)
    found = {each.check: each for each in examine(world, build_config({"data": data, **values}, "test"))}
    assert found["host"].status == "warning" and found["host"].message.endswith("for 8 processes")
    assert "optim.lr" not in found
    assert (found["batch"].status if "batch" in found else None) == status


def test_the_images_of_an_epoch_of_a_mixture_are_compared_with_the_batch(tmp_path):
    write_records(tmp_path / "a", [0, 1] * 65, size=16)
    for weight, status in ((1, "ok"), (0.5, "failure")):
        (tmp_path / "m.yaml").write_text(f"datasets: [{{path: a, weight: {weight}}}]")
        assert examined(tmp_path / "m.yaml").get("batch", passed("", "")).status == status


def test_sets_at_addresses_are_no_failure(tmp_path):
    data = {"train": str(write_records(tmp_path, [0, 0, 1, 2, 2], size=16)), "image_size": 16}
    own = str(tmp_path / "own.bin")
    write_bin(Path(own), [encoded_image(100 + n) for n in range(4)], np.array([True, False]))
    for sets in (
        {"dir": "s3://bucket/sets", "targets": ["lfw", own]},
        {"targets": ["s3://bucket/lfw.bin", own]},
    ):
        config = build_config({"data": data, "eval": sets}, "test")
        world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
        (result,) = (each for each in examine(world, config) if each.check == "verification sets")
        assert result.status == "ok" and sets["targets"][0] in result.message
        assert "own (2 pairs)" in result.message, "a path is read"


def test_missing_labels_and_other_image_sizes_are_warnings(tmp_path):
    results = examined(write_records(tmp_path, [0, 1, 2, 5], size=20))
    assert [results[name].status for name in ("dataset", "identities", "reading")] == [
        "ok",
        "warning",
        "warning",
    ]
    assert "2 labels below the highest" in results["identities"].message
    assert "20 × 20" in results["reading"].message


def test_unreadable_images_are_a_failure_that_names_the_first(tmp_path):
    folder = write_records(tmp_path, [0, 0, 1, 1], size=16)
    damage_records(folder / "train.rec", (1,))
    found = examined(folder)["reading"]
    assert found.status == "failure" and "1 of 4" in found.message and "train.rec" in found.message


def test_unreadable_images_that_training_skips_are_a_warning(tmp_path):
    folder = write_records(tmp_path, [0, 0, 1, 1], size=16)
    damage_records(folder / "train.rec", (1,))
    found = examined(folder, bad_records="skip")["reading"]
    assert found.status == "warning" and "bad_records" not in found.advice, "it is set already"
    damage_records(folder / "train.rec", (0, 1, 2, 3))
    assert examined(folder, bad_records="skip")["reading"].status == "failure"


def test_an_unreadable_image_of_a_verification_set_is_a_failure(tmp_path):
    folder = write_records(tmp_path / "data", [0, 0, 1, 1], size=16)
    own = tmp_path / "own.bin"
    write_bin(own, [*(encoded_image(100 + n) for n in range(3)), b"damaged"], np.array([True, False]))
    found = examined(folder, targets=[str(own)])["reading"]
    assert found.status == "failure" and found.check == "reading of own"
    assert "1 of 4 images cannot be read; the first: image 3" in found.message


@pytest.mark.parametrize(
    ("labels", "values", "words"),
    [
        (None, {}, "no such folder"),
        ([0, 1], {"num_classes": 3}, "num_classes is 3"),
        ([0, 0], {}, "one identity"),
    ],
)
def test_a_dataset_that_a_run_refuses_is_a_failure(tmp_path, labels, values, words):
    if labels:
        write_records(tmp_path / "data", labels, size=16)
    found = examined(tmp_path / "data", **values)
    assert found["dataset"].status == "failure" and words in found["dataset"].message
    assert found["verification"].status == "ok", "the other checks still run"


def test_a_list_of_photos_with_landmarks_is_a_failure(tmp_path):
    points = "\t".join(map(str, range(14)))
    (tmp_path / "a.lst").write_text(f"0\ta.png\t0\t{points}\n1\tb.png\t1\n")
    found = examined(tmp_path / "a.lst")["dataset"]
    assert found.status == "failure" and "facetrain data pack" in found.message


def test_the_network_of_one_process_is_not_measured():
    result = check_network(torch.device("cpu"))
    assert result.status == "ok" and "torchrun" in result.message
