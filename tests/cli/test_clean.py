"""`facetrain data clean`: decisions, contact sheets, reports, and what is refused."""

import hashlib
import json

import cv2
import numpy as np
import pytest

from facetrain.cli.app import app
from facetrain.data.open_dataset import open_dataset
from tests.support.command import refusal
from tests.support.models import SMALL, write_model

PEOPLE, EACH, WRONG = 30, 8, 15


def run(capsys, *arguments):
    """Run `facetrain data …` in this process and return what it prints."""
    with pytest.raises(SystemExit) as ended:
        app(["data", *map(str, arguments)])
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    return printed.out


def write_images(folder, noise):
    """Write identities whose images are one drawing with noise, some of them in another identity's folder."""
    rng = np.random.default_rng(0)
    drawing = rng.integers(0, 256, (PEOPLE, 32, 32, 3))
    for number in range(PEOPLE * EACH):
        person = number % PEOPLE
        shown = (person + 7) % PEOPLE if number < WRONG else person
        image = (drawing[shown] + noise * rng.normal(size=(32, 32, 3))).clip(0, 255).astype(np.uint8)
        path = folder / f"人 {person}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".png", image)[1])
    return folder


@pytest.fixture
def faces(tmp_path):
    """Return a model and a dataset with wrong labels."""
    import torch

    torch.manual_seed(0)
    model = tmp_path / "model.safetensors"
    write_model(model, options=SMALL | {"embedding_size": 32})
    return model, write_images(tmp_path / "data", 20)


def content(folder):
    """Return a digest of each image, by identity, of a dataset."""
    source = open_dataset(folder)
    rows = zip(source.labels.tolist(), map(source.read, range(source.num_images)), strict=True)
    return [(label, hashlib.sha256(data).hexdigest()) for label, data in rows]


def test_a_report_is_written_edited_and_applied(faces, tmp_path, capsys):
    model, data = faces
    before, report = content(data), tmp_path / "report.json"
    outputs = ("--report", report, "--sheet", tmp_path / "sheet.html", "--output", tmp_path / "out")
    printed = run(capsys, "clean", model, data, *outputs, "--yes")
    assert "EER" in printed and f"look at them in {tmp_path / 'sheet.html'}" in printed
    decisions = json.loads(report.read_text(encoding="utf-8"))["decisions"]
    wrong = {f"人 {number}/{number}.png" for number in range(WRONG)}
    assert {one["name"] for one in decisions} == wrong
    moved = [one for one in decisions if one["target_name"]]
    assert moved and all(
        one["target_name"] == f"人 {(int(one['name'].split('/')[1][:-4]) + 7) % PEOPLE}" for one in moved
    )
    sheet = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert all(one["name"] in sheet for one in decisions)
    run(capsys, "clean", data, "--apply", report, "--output", tmp_path / "again", "--yes")
    assert content(tmp_path / "again") == content(tmp_path / "out") != before
    edited = json.loads(report.read_text(encoding="utf-8"))
    for one in edited["decisions"]:
        one["apply"] = False
    report.write_text(json.dumps(edited), encoding="utf-8")
    run(capsys, "clean", data, "--apply", report, "--output", tmp_path / "same")
    assert sorted(content(tmp_path / "same")) == sorted(before) == sorted(content(data))
    assert "made of another dataset" in str(
        refusal("data", "clean", tmp_path / "out", "--apply", report, "--output", tmp_path / "x")
    )


@pytest.mark.slow
def test_a_large_cut_needs_yes_and_a_model_that_can_tell_identities_apart(faces, tmp_path, capsys):
    model, data = faces
    report = tmp_path / "report.json"
    run(capsys, "clean", model, data, "--report", report)
    error = refusal("data", "clean", data, "--apply", report, "--output", tmp_path / "out")
    assert "repeat the command with --yes" in str(error) and not (tmp_path / "out").exists()
    noise = write_images(tmp_path / "noise", 5000)
    refused = refusal("data", "clean", model, noise, "--output", tmp_path / "out", "--yes")
    assert "cannot separate them" in str(refused) and not (tmp_path / "out").exists()
    (noise / "dataset_card.yaml").write_text("nmae: noise")  # only an output gets it
    printed = run(capsys, "clean", model, noise)
    assert "no label is judged" in printed


def test_arguments_that_contradict_apply_are_refused(tmp_path):
    report = tmp_path / "report.json"
    for options, message in (
        ([], "needs a model and a dataset"),
        (["--apply", report], "give the folder of the new dataset with --output"),
        ([tmp_path, "--apply", report], "--apply REPORT, which needs no model"),
        (["--apply", report, "--output", tmp_path / "o", "--sheet", tmp_path / "s.html"], "s.html"),
        (
            ["--apply", report, "--output", tmp_path / "o", "--device", "cpu"],
            "runs no model; remove --device",
        ),
        ([tmp_path, "--yes"], "--yes: nothing is written without --output"),
        ([tmp_path, "--workers", 3], "--workers 3: nothing is written without --output"),
    ):
        assert message in str(refusal("data", "clean", tmp_path, *options))


def test_a_dataset_that_is_too_small_to_judge_is_named(faces, capsys):
    model, data = faces
    for folder in data.iterdir():
        kept = [image for image in folder.iterdir() if int(image.stem) >= WRONG]
        for image in folder.iterdir():
            if image not in kept[:3] or folder.name > "人 12":
                image.unlink()
    printed = run(capsys, "clean", model, data)
    assert "no label is judged" in printed and "15 images are too few" in printed
