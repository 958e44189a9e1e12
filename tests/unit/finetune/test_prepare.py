"""Preparation of a fine-tuning, also of one that continues an interrupted one."""

import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import cv2
import numpy as np
import pytest

from facetrain.config.loading import dump_config
from facetrain.config.paths import with_absolute_paths, with_paths_of_sets
from facetrain.data.open_dataset import open_dataset
from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.data.tools.landmark_table import LandmarkTable
from facetrain.data.tools.yunet import YuNet
from facetrain.embeddings.inference import Inference
from facetrain.errors import ConfigError, UsageError
from facetrain.finetune.first_model import trainable_model
from facetrain.finetune.held_out import write_photo_pairs
from facetrain.finetune.photo_faces import needed_finder, split_faces
from facetrain.finetune.prepare import prepare
from facetrain.finetune.workplace import Request, Workplace
from facetrain.models.model_file import CARDS_KEY
from facetrain.models.read_model import read_model
from facetrain.run.folder.run_state import FINISHED, STOPPED, record_end
from tests.support.models import SMALL, write_model

PEOPLE, EACH = 12, 4


@contextmanager
def bar(title):
    yield lambda *_: None


class Interrupted(Exception):
    """What a user does at a line of the output."""


def interrupt(line):
    raise Interrupted(line)


def request_in(folder, **options):
    """Write photos and a model, and return the request of a fine-tuning."""
    photos = folder / "photos"
    for person in range(PEOPLE):
        (photos / str(person)).mkdir(parents=True)
        for number in range(EACH):
            (photos / f"{person}/{number}.jpg").write_bytes(draw_jpeg(0, person, number, 32))
    write_model(folder / "first.safetensors")
    return Request(photos, folder / "first.safetensors", folder / "out", **options)


def test_a_wrong_setting_is_refused_before_the_faces_are_aligned(tmp_path, monkeypatch):
    request = request_in(tmp_path, overrides=("optim.rate=1",))
    with pytest.raises(ConfigError, match=r"optim\.rate"):
        prepare(request, None, interrupt, bar)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"has no GPU: .* or --set train\.device=cpu$"):
        prepare(replace(request, overrides=("train.device=cuda",)), None, interrupt, bar)
    assert not (tmp_path / "out").exists()


def test_the_photos_are_embedded_on_the_device_that_the_user_gives(tmp_path, monkeypatch):
    embed = Mock(side_effect=Interrupted)
    monkeypatch.setattr("facetrain.finetune.prepare.write_teacher_embeddings", embed)
    with pytest.raises(Interrupted):
        prepare(request_in(tmp_path, overrides=("train.device=cpu",)), None, print, bar)
    assert Inference("cpu") in embed.call_args.args


@pytest.mark.parametrize("moved_to", ["out", "moved/out"])
def test_the_settings_of_an_ended_training_need_not_be_given_again(moved_to, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = request_in(Path(), overrides=("optim.lr=0.5", "train.batch_size=8", "model.lora={rank: 2}"))
    first = prepare(request, None, print, bar)
    first.place.run.mkdir()
    (first.place.run / "config.yaml").write_text(
        dump_config(with_absolute_paths(with_paths_of_sets(first.config)))
    )
    Path("moved").mkdir()
    place = Workplace(Path("out").rename(moved_to))
    again = replace(request, output=place.folder, overrides=("seed=3",), resume=True)
    record_end(place.run, STOPPED, "")
    assert prepare(again, None, print, bar).config.optim.lr == 1e-3
    given = prepare(replace(again, overrides=(*request.overrides, "seed=3")), None, print, bar)
    record_end(place.run, FINISHED, "")
    prepared = prepare(again, None, print, bar)
    assert prepared.config == given.config and "lr: 0.5" in prepared.text
    assert [one.values for one in prepared.choices] == [one.values for one in given.choices]


def split(request):
    """Split the photos of a request as if they were aligned; return the place of the parts, and what is said."""
    place, said = Workplace(request.output), []
    place.folder.mkdir()
    request.photos.rename(place.faces)
    split_faces(request, place, said.append, bar)
    return place, said


def test_a_copy_of_an_image_is_left_out_and_said(tmp_path):
    request = request_in(tmp_path)
    shutil.copy(request.photos / "0" / "0.jpg", request.photos / "0" / "copy.jpg")
    _, (line,) = split(request)
    assert line.startswith("left out 1 image that is a copy of another: ")


def test_an_image_under_two_people_is_left_out_of_both_and_named(tmp_path):
    request = request_in(tmp_path)
    shutil.copy(request.photos / "0" / "0.jpg", request.photos / "1" / "group.jpg")
    (request.photos / "0" / "more.jpg").write_bytes(draw_jpeg(0, 0, EACH, 32))
    place, (line,) = split(request)
    assert line.startswith("left out 2 images with copies under another person, ")
    assert line.endswith(": 0/0.jpg, 1/group.jpg")
    parts = [open_dataset(folder) for folder in (place.train, place.held_out, place.set_aside)]
    assert sum(part.num_images for part in parts) == PEOPLE * EACH


def test_given_landmarks_of_aligned_faces_are_used_and_a_detector_is_not(tmp_path):
    request, table, said = request_in(tmp_path), LandmarkTable(), []
    assert needed_finder(request, open_dataset(request.photos), table, 32, said.append) is table and not said
    assert needed_finder(request, open_dataset(request.photos), Mock(spec=YuNet), 32, said.append) is None
    assert "aligned faces already, so the detector is not used" in said[0]


@pytest.mark.parametrize("unreadable", [0, 500])
def test_a_given_detector_is_used_if_some_of_the_readable_images_are_photos(unreadable, tmp_path):
    request, detector = request_in(tmp_path), Mock(spec=YuNet)
    for number in range(3):
        photo = cv2.imencode(".png", np.zeros((48, 64, 3), np.uint8))[1]
        (request.photos / f"{PEOPLE - 1}/{number}.jpg").write_bytes(photo)
    (request.photos / "aa").mkdir()
    for number in range(unreadable):
        (request.photos / f"aa/{number}.heic").write_bytes(b"\0\0\0\x18ftypheic")
    assert needed_finder(request, open_dataset(request.photos), detector, 32, interrupt) is detector


def test_photos_of_a_list_with_landmarks_need_no_detector(tmp_path, monkeypatch):
    request = request_in(tmp_path)
    points = "\t".join(map(str, range(10)))
    lines = [
        f"0\t{path}\t{path.parent.name}\t0\t0\t9\t9\t{points}\n" for path in request.photos.glob("*/*.jpg")
    ]
    (tmp_path / "photos.lst").write_text("".join(lines))
    monkeypatch.setattr("facetrain.finetune.photo_faces.PhotoCheck.finding", lambda _: "photos")
    listed = replace(request, photos=tmp_path / "photos.lst")
    assert needed_finder(listed, open_dataset(listed.photos), None, 32, interrupt) is None
    with pytest.raises(UsageError, match="--detector yunet"):
        needed_finder(request, open_dataset(request.photos), None, 32, interrupt)


def test_a_list_that_calls_its_images_photos_needs_a_detector_although_they_look_aligned(tmp_path):
    request, detector = request_in(tmp_path), Mock(spec=YuNet)
    lines = [
        f"0\t{path.relative_to(tmp_path)}\t{path.parent.name}\n" for path in request.photos.glob("*/*.jpg")
    ]
    (tmp_path / "photos.lst").write_text("".join(lines))
    request = replace(request, photos=tmp_path / "photos.lst")
    with pytest.raises(UsageError, match=r"photos\.lst: .*flag 0.* --detector yunet"):
        prepare(request, None, interrupt, bar)
    assert not request.output.exists()
    assert needed_finder(request, open_dataset(request.photos), detector, 32, interrupt) is detector


@pytest.mark.parametrize(
    ("removed", "added"),
    [("3/2.jpg", None), (None, "3/9.jpg"), ("3/2.jpg", "5/0a.jpg"), ("3/2.jpg", "3/2.jpg")],
)
def test_a_fine_tuning_of_photos_that_have_changed_is_not_resumed(removed, added, tmp_path):
    request = request_in(tmp_path)
    photos = request.photos
    with pytest.raises(Interrupted, match="faces: 48 faces of 12 people"):
        prepare(request, None, interrupt, bar)

    resumed = Request(photos, request.model, request.output, resume=True)
    with pytest.raises(Interrupted, match="images of 10 people are held out"):
        prepare(resumed, None, interrupt, bar)
    if removed:
        (photos / removed).unlink()
    if added:
        (photos / added).write_bytes(draw_jpeg(0, 99, 0, 32))
    with pytest.raises(UsageError, match="was begun with other photos"):
        prepare(resumed, None, interrupt, bar)


def test_the_trainable_copy_of_an_onnx_file_keeps_the_cards_of_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "facetrain.finetune.first_model.initialize_backbone", lambda *_: {CARDS_KEY: ["card"]}
    )
    place = SimpleNamespace(train=request_in(tmp_path).photos, first=tmp_path / "copy.safetensors")
    trainable_model(Path("first.onnx"), {"name": "iresnet", **SMALL}, place)
    assert read_model(place.first)[1][CARDS_KEY] == ["card"]


@pytest.mark.parametrize("replaced", ["first.safetensors", "landmarks.csv"])
def test_a_fine_tuning_whose_model_or_landmarks_have_changed_is_not_resumed(replaced, tmp_path):
    (tmp_path / "landmarks.csv").write_text("0/0.jpg,1,1,2,1,1,2,1,3,2,3\n")
    request = request_in(tmp_path, aligner=tmp_path / "landmarks.csv")
    with pytest.raises(Interrupted, match="faces: 48 faces of 12 people"):
        prepare(request, None, interrupt, bar)
    resumed = replace(request, resume=True)
    with pytest.raises(Interrupted, match="are held out"):
        prepare(resumed, None, interrupt, bar)
    with (tmp_path / replaced).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(UsageError, match="was begun with .*another model, detector"):
        prepare(resumed, None, interrupt, bar)


def test_photos_of_the_training_in_a_set_of_other_people_are_warned_of_before_the_training(tmp_path, capsys):
    request = request_in(tmp_path)
    with pytest.raises(Interrupted, match="faces: 48 faces of 12 people"):
        prepare(request, None, interrupt, bar)
    with pytest.raises(Interrupted, match="are held out"):
        prepare(replace(request, resume=True), None, interrupt, bar)
    train, others = request.output / "data" / "train", tmp_path / "others.bin"
    write_photo_pairs(train, others)
    with pytest.raises(Interrupted, match="are held out"):
        prepare(replace(request, resume=True, targets=(str(others),)), None, interrupt, bar)
    assert f"warning: others: 16 of 16 examined images are in {train}," in capsys.readouterr().err
