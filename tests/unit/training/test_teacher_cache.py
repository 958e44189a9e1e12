"""Teacher's embeddings that were computed once: equal to those of the live teacher, and of this dataset only."""

import json
import shutil
import struct
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from facetrain.checkpoint.load import Checkpoint
from facetrain.data.images.augment import Augment
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.embeddings.inference import Inference
from facetrain.errors import CheckpointError, ConfigError, DataError
from facetrain.models.embedding_model import open_model
from facetrain.models.model_digest import digest_model
from facetrain.run.folder.data_digests import digest_inputs, digest_labels, digest_samples
from facetrain.run.parts.distillation import build_distillation
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.run.parts.teacher_embeddings import open_cache, write_teacher_embeddings
from facetrain.training.teacher import LiveTeacher
from facetrain.training.teacher_cache import DIGESTS, CachedTeacher, cache_digest, new_cache
from tests.runs.conftest import train_and_resume
from tests.support import training
from tests.support.datasets import batch_of, write_records
from tests.support.runs import distill_losses
from tests.support.world import ONE_RANK

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def taught(runs, dataset):
    """The folder of a teacher with its cache, and a function that returns the config of a student."""
    folder, config = runs
    write_teacher_embeddings(
        folder / "teacher", dataset / "data", folder / "t.safetensors", Inference("cpu", 50)
    )
    return folder, partial(config, "cached", 8, f"distill.teacher={folder}/teacher", "distill.weight=5")


def cached(taught, folder, path=None, digests=None, **changes):
    source, model = open_dataset(folder / "data"), open_model(taught[0] / "teacher", CPU)
    own = {
        "dataset": digest_labels(source),
        "samples": digest_samples(source),
        "landmarks": "",
        "teacher": digest_model(model, taught[0]),
    }
    options = {
        "digests": own | (digests or {}),
        "num_images": source.num_images,
        "flips": Augment(5).flips,
        "needs_mirrored": True,
    }
    return CachedTeacher(path or taught[0] / "t.safetensors", **options | changes)


def test_fixed_centers_are_the_means_of_the_unit_embeddings_of_the_cache(taught, tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.run.parts.distillation._CLASSES_PER_MEAN", 3)
    monkeypatch.setattr("facetrain.training.teacher_cache._ROWS_PER_READ", 10)
    cache, config = taught[0] / "t.safetensors", taught[1]
    config = config(f"distill.cache={cache}", "distill.loss=fixed_centers")
    source = open_dataset(config.data.train)
    schedule = schedule_steps(config, source.num_images, 1)
    found = build_distillation(config, ONE_RANK, 20, tmp_path, schedule, source).centers.row_state()["weight"]
    unit = F.normalize(load_file(cache)["embedding"].double(), dim=2)
    torch.testing.assert_close(found, unit.view(20, -1, found.shape[1]).mean(1).float())


def test_cached_embeddings_equal_those_of_the_flipped_images(taught, dataset):
    source, model = open_dataset(dataset / "data"), open_model(taught[0] / "teacher", CPU)
    augment, sample_B = Augment(5), torch.tensor([7, 0, 119, 64, 3, 50])
    pixels = torch.from_numpy(np.stack([decode_rgb(source.read(n), location="") for n in sample_B.tolist()]))
    flip_B = augment.flips(sample_B, 2)
    assert flip_B.any() and not flip_B.all()
    batch = batch_of(0, 2, pixels, torch.zeros(6), sample_B)
    image = augment(pixels, sample_B, 2)
    expected = LiveTeacher(model, "")(batch, image)
    found = cached(taught, dataset, flips=augment.flips)(batch, image)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    plain = cached(taught, dataset, flips=Augment(5, flip=0).flips)(batch, image)
    assert torch.equal(plain[~flip_B], found[~flip_B]) and not torch.allclose(plain[flip_B], found[flip_B])


def test_a_replaced_image_has_the_embedding_of_its_replacement_with_the_flip_of_its_pixels(taught, dataset):
    augment, sample_B, read_B = Augment(5), torch.tensor([7, 0, 119, 64]), torch.tensor([7, 1, 0, 64])
    flip_B = augment.flips(sample_B, 2)
    assert flip_B.tolist() != augment.flips(read_B, 2).tolist()
    batch = batch_of(0, 2, torch.zeros(0), torch.zeros(4), sample_B, read_B=read_B)
    rows = load_file(taught[0] / "t.safetensors")["embedding"]
    found = cached(taught, dataset, flips=augment.flips)(batch, torch.zeros(0))
    assert torch.equal(found, rows[read_B, flip_B.long()])


def test_a_run_with_a_cache_equals_one_with_the_live_teacher_and_resumes_bit_for_bit(taught, tmp_path):
    folder, config = taught
    assert training.train(config(), tmp_path / "live") == 0
    train_and_resume(config(f"distill.cache={folder}/t.safetensors"), tmp_path / "cached", 2)
    values = [distill_losses(tmp_path / name) for name in ("live", "cached")]
    assert len(values[0]) == 4 and values[1] == pytest.approx(values[0], rel=1e-4)


def test_a_run_reads_a_cache_at_an_address(taught, dataset, web_server, tmp_path, monkeypatch):
    folder, config = taught
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    web_server.files["/t.safetensors"] = (folder / "t.safetensors").read_bytes()
    remote = config(f"distill.cache={web_server.address}/t.safetensors")
    source = open_dataset(dataset / "data")
    open_cache(remote, source, Augment(5))
    digests = digest_inputs(remote, source, [])
    assert digests["teacher_cache"] == cache_digest(folder / "t.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digests": {"dataset": "other"}}, "was written for another dataset; write it again"),
        ({"digests": {"landmarks": "other"}}, "was written for other landmarks; write it again"),
        ({"digests": {"teacher": "other"}}, "was written for another teacher; write it again"),
        ({"digests": {"dataset": "o", "teacher": "o"}}, "another dataset and another teacher"),
        ({"num_images": 121}, "was written for another dataset"),
    ],
)
def test_a_cache_of_other_data_or_another_teacher_is_refused(taught, dataset, changes, message):
    with pytest.raises(DataError, match=message):
        cached(taught, dataset, **changes)


def test_a_cache_of_other_images_with_the_same_labels_is_refused(taught, dataset, tmp_path):
    config = taught[1](f"distill.cache={taught[0]}/t.safetensors")
    open_cache(config, open_dataset(dataset / "data"), Augment(5))
    others = open_dataset(write_records(tmp_path / "data", [n // 6 for n in range(120)], size=24))
    with pytest.raises(DataError, match="was written for other images; write it again"):
        open_cache(config, others, Augment(5))


def test_a_cache_without_mirrored_rows_is_refused_if_images_are_flipped(taught, dataset, tmp_path):
    path = tmp_path / "plain.safetensors"
    write_teacher_embeddings(taught[0] / "teacher", dataset / "data", path, Inference("cpu"), flip=False)
    with pytest.raises(DataError, match=r"plain\.safetensors: .*data\.augment\.flip"):
        cached(taught, dataset, path)
    assert cached(taught, dataset, path, needs_mirrored=False).embedding_size == 8


def header(**tensor):
    described = {"dtype": "F32", "shape": [120, 2, 8], "data_offsets": [0, 0]} | tensor
    text = json.dumps({"__metadata__": {"dataset": "", "teacher": ""}, "embedding": described}).encode()
    return struct.pack("<Q", len(text)) + text


CRAFTED = {
    "empty": b"",
    "not JSON": struct.pack("<Q", 4) + b"{{{{",
    "a header of any size": struct.pack("<Q", 1 << 62),
    "without the data": header(),
    "a huge shape": header(shape=[1 << 62, 2, 1 << 62]),
    "an infinite shape": header(shape=[float("inf"), 1, 1]),
    "a negative shape": header(shape=[-1, 2, 8]),
    "another dtype": header(dtype="F64"),
    "a list": struct.pack("<Q", 2) + b"[]",
    "deep": struct.pack("<Q", 60000) + b"[" * 60000,
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_crafted_or_damaged_cache_is_refused(taught, dataset, tmp_path, crafted):
    path = tmp_path / "c.safetensors"
    path.write_bytes(CRAFTED[crafted])
    with pytest.raises(DataError, match="embeddings"):
        cached(taught, dataset, path)


def test_a_damaged_row_is_named_when_it_is_read_and_other_embeddings_have_another_digest(
    taught,
    dataset,
    tmp_path,
):
    path = Path(shutil.copy(taught[0] / "t.safetensors", tmp_path))
    data = bytearray(path.read_bytes())
    rows = 120 * 2 * (8 + 1) * 4  # with the checksums
    data[-rows + (7 * 2 + 1) * 8 * 4] ^= 1  # in the embedding of the mirror image of image 7
    path.write_bytes(data)
    batch = batch_of(0, 0, torch.zeros(0), torch.zeros(3), torch.tensor([6, 7, 8]))
    for mirrored in (False, True):
        teacher = cached(taught, dataset, path, flips=lambda *_, flip=mirrored: torch.full((3,), flip))
        with pytest.raises(DataError, match="image 7 ") if mirrored else nullcontext():
            teacher(batch, torch.zeros(0))
    with pytest.raises(DataError, match="image 7 "):
        cached(taught, dataset, path).mean_embeddings(
            np.repeat(np.arange(20), 6), 0, 3, into=torch.zeros(3, 8)
        )
    others = tmp_path / "other.safetensors"
    with new_cache(others, (120, 2, 8), dict.fromkeys(DIGESTS, "")) as write:
        for first in (50, 0):
            write(first, np.ones((70, 2, 8), np.float32))
    tensors = load_file(others)
    assert (tensors["embedding"] == 1).all()
    assert (tensors["checksum"].numpy() == zlib.crc32(np.ones(8, np.float32))).all()
    assert len({cache_digest(each) for each in (taught[0] / "t.safetensors", others)}) == 2


def test_a_cache_that_does_not_exist_is_reported_with_the_command(taught, dataset, tmp_path):
    with pytest.raises(DataError, match=r"absent\.safetensors: .*facetrain embed"):
        cached(taught, dataset, tmp_path / "absent.safetensors")


def test_fixed_centers_are_the_means_of_the_unit_embeddings_of_each_class(taught, dataset):
    rows = load_file(taught[0] / "t.safetensors")["embedding"].double()
    unit = rows / rows.norm(dim=2, keepdim=True)
    labels = np.repeat(np.arange(20), 6)
    expected = unit.view(20, 12, 8).mean(1)
    found = torch.full((7, 8), 5.0)
    cached(taught, dataset).mean_embeddings(labels, 4, 11, into=found)
    torch.testing.assert_close(found, expected[4:11].float())
    cached(taught, dataset, needs_mirrored=False).mean_embeddings(labels, 4, 11, into=found)
    torch.testing.assert_close(found, unit[:, 0].view(20, 6, 8).mean(1)[4:11].float())
    labels[24:30] = 3
    found.fill_(5)
    cached(taught, dataset).mean_embeddings(labels, 4, 5, into=found[:1])
    assert (found == 5).all(), "a class without images keeps its center"


def test_fixed_centers_pull_the_student_alone_and_are_not_saved(taught, tmp_path):
    folder, config = taught
    options = [
        f"distill.cache={folder}/t.safetensors",
        "distill.loss=fixed_centers",
        "distill.margin_weight=0",
    ]
    train_and_resume(config(*options, "distill.weight=1"), tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match="no table teacher_weight"):
        Checkpoint.open(tmp_path / "run").rows("teacher_weight", 0, 20)
    with pytest.raises(ConfigError, match="fixed_centers needs cache"):
        config("distill.loss=fixed_centers")


def test_a_cache_of_the_whole_dataset_serves_a_run_without_its_small_identities(taught, tmp_path):
    labels = [n // 6 for n in range(54)] + [9, 10, 10]  # identity 9 has one image
    write_records(tmp_path / "data", labels, size=32)
    write_teacher_embeddings(
        taught[0] / "teacher", tmp_path / "data", tmp_path / "t.safetensors", Inference("cpu")
    )
    options = [f"data.train={tmp_path}/data", f"distill.cache={tmp_path}/t.safetensors"]
    config = taught[1](*options, "data.min_images_per_identity=2")
    source = open_dataset(tmp_path / "data", min_images_per_identity=2)
    assert source.num_images == 56
    teacher = open_cache(config, source, Augment(5, flip=0))
    whole = load_file(tmp_path / "t.safetensors")["embedding"][:, 0]
    sample_B = torch.tensor([0, 53, 54, 55])
    found = teacher(batch_of(0, 0, torch.zeros(0), torch.zeros(4), sample_B), torch.zeros(0))
    assert torch.equal(found, whole[torch.tensor([0, 53, 55, 56])])
    into = torch.zeros(1, 8)
    teacher.mean_embeddings(source.labels, 9, 10, into=into)
    unit = torch.nn.functional.normalize(load_file(tmp_path / "t.safetensors")["embedding"][55:], dim=2)
    assert torch.allclose(into[0], unit.mean((0, 1)))
