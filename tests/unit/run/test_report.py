"""Report of a run: one page with everything that the files of the run tell."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from facetrain.config.loading import build_config, dump_config, load_config
from facetrain.data.images.decode import encode_jpeg, encode_png
from facetrain.errors import RunError, UsageError
from facetrain.run.folder import run_state
from facetrain.run.folder.run_files import log_of_host
from facetrain.run.folder.run_state import Start, train_recorded
from facetrain.run.lr_range_test import RangeTest
from facetrain.run.report import page as page_module
from facetrain.run.report.history import History
from facetrain.run.report.page import run_values, write_run_report
from facetrain.telemetry.jsonl import JsonLines
from facetrain.verify.output.hardest_pairs import HardestPairs, ShownPair, VerifiedPairs
from tests.support.command import facetrain

NAME = '<b>bold & "quoted" \'$x'
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += f"{data}\n"


@pytest.fixture
def folder(tmp_path):
    """A run whose every name tries to be HTML."""
    folder = tmp_path / NAME
    folder.mkdir()
    changes = ["optim.lr=0.0321", "run.name=tiny", f"eval.targets=['{EVIL}']"]
    (folder / "config.yaml").write_text(dump_config(load_config("ms1mv3_r50", changes)))
    (folder / "environment.json").write_text(json.dumps({"packages": {"torch": EVIL}, "command": [EVIL]}))
    lines = JsonLines(folder / "metrics.jsonl")
    for step in (0, 10, 20):
        lines.write(step, {f"{EVIL}/accuracy": 0.5 + step / 100, f"{EVIL}/auc": 0.75})
        lines.write(step + 1, {"loss": 3.0, "lr": 0.1, "images_per_s": 1234.0, "peak_memory_gib": 2.5})
    lines.write(
        22, {"loss": float("nan"), "lr": 0.1, "images_per_s": 1234.0, "wait_s": 1.5, "skipped_images": 3.0}
    )
    lines.close()
    RangeTest(rates=[0.01, 0.1, 1.0], losses=[3.0, 2.0, float("nan")], lr=0.0321).write(folder)
    (folder / "skipped_images.txt").write_text(f"{EVIL}: damaged\n")
    (folder / "log.txt").write_text(f"1970 rank 0 WARNING {EVIL} warns\n1970 rank 0 INFO quiet\n")
    sheet = np.zeros((8, 8, 3), np.uint8)
    (folder / "augmented.png").write_bytes(encode_png(sheet))
    pair = ShownPair(pair=7, score=0.125, images=(encode_jpeg(sheet, 90),) * 2)
    pairs = VerifiedPairs(step=20, sets={EVIL: HardestPairs(genuine=(pair,))})
    (folder / "hardest_pairs.json").write_text(pairs.model_dump_json())
    for step in (0, 10):
        train_recorded(folder, Start(step=step, ranks=2, device="cpu"), 40, lambda: 143)
    return folder


def test_a_range_test_that_a_loss_has_ended_names_the_rates_that_it_has_tried():
    test = RangeTest(rates=[0.01, 0.1, 1.0], losses=[3.0, float("nan")], lr=0.02)
    assert test.describe() == (
        "--lr find: optim.lr 0.02, from the rates that lowered the loss in 2 steps with rates from 0.01 to 0.1"
    )


@pytest.fixture
def text(folder):
    write_run_report(folder, folder / "report.html")
    return (folder / "report.html").read_text()


def test_the_page_has_every_part_of_the_run(text):
    page = Page(text)
    parts = ("Config", "Curves", "Verification", "Skipped images", "Warnings")
    for part in (*parts, "Learning rate test", "Starts", "Environment", NAME):
        assert f"{part}\n" in page.text
    assert re.search(r"optim.lr\n0.\d+\n0.0321\n", page.text), "a key with the preset's value and the run's"
    assert "ms1mv3_r50" in page.text and "run.name" not in page.text
    assert "stopped" in page.text and "22 of 40" in page.text
    assert "70.00%" in page.text and "0.7500" in page.text and "1,234" in page.text
    assert "images that could not be read" in page.text
    assert "1 resume or restart" in page.text and "warns" in page.text and "quiet" not in page.text
    assert page.tags.count("svg") == 5 and "--lr find: optim.lr 0.0321" in page.text


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the curves of the page, which take most of its time."""
    monkeypatch.setattr(page_module, "draw_curve", lambda *_, **options: None)
    monkeypatch.setattr(page_module, "svg", lambda figure, name: name)


def test_the_first_lines_of_the_page_are_the_best_and_the_last_numbers(tmp_path, undrawn, monkeypatch):
    config = build_config({"data": {"train": "x"}}, "test")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "environment.json").write_text('{"gpu": {"driver": {"cuda": "13"}}, "command": ["é"]}')
    (tmp_path / log_of_host(0)).write_bytes(b"1970 rank 0 WARNING caf\xe9\n" * 150)
    (tmp_path / log_of_host(8)).write_text(
        "1969 rank 9 WARNING early\n1971 rank 8 WARNING late\n1972 rank 8 INFO\n"
    )
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(0, {"lfw/accuracy": 0.95, "agedb/accuracy": 0.5, "agedb/auc": 0.25})
    lines.write(1, {"loss": 30.0, "images_per_s": 100.0, "peak_memory_gib": 2.0})
    lines.write(2, {"loss": 20.0, "images_per_s": 400.0, "peak_memory_gib": 1.0, "skipped_images": 0.0})
    lines.write(2, {"lfw/accuracy": 0.9999, "agedb/accuracy": 0.6})
    lines.write(3, {"loss": 10.0, "images_per_s": float("nan"), "left_s": 65.0, "wait_s": 1.5})
    lines.close()
    tiles = [
        ("best accuracy on agedb", "60.00%"),
        ("loss, 30.0000 at first", "10.0000"),
        ("images per second, 100 to 400", "250"),
        ("waited for images since the last start", "1.5 s"),
        ("peak memory of rank 0", "2.00 GiB"),
    ]
    monkeypatch.setattr(run_state, "is_locked", lambda folder: True)
    seen = []

    def train():
        seen.append(run_values(tmp_path))
        raise RunError("the disk is full")

    with pytest.raises(RunError, match="full"):
        train_recorded(tmp_path, Start(step=0, ranks=2, device="cpu"), 40, train)
    running, ended = seen[0], run_values(tmp_path)
    assert running["tiles"] == [*tiles[:3], ("left", "0:01:05"), *tiles[3:]] and ended["tiles"] == tiles
    assert running["is_running"] and not ended["is_running"] and running["kind"] != ended["kind"] == "bad"
    assert ended["headline"] == "99.990%" and "full" in ended["reason"] and running["reason"] == ""
    assert running["words"] == "best accuracy on lfw; running at step 3 of 40"
    assert ended["warnings"].count == 152 and ended["warnings"].last == [
        "1970 rank 0 WARNING caf\ufffd"
    ] * 99 + ["1971 rank 8 WARNING late"]
    header, rows = ended["verifications"]
    assert header == ["step", "lfw accuracy", "agedb accuracy", "agedb AUC"]
    assert rows == [["0", "95.00%", "50.00%", "0.2500"], ["2", "99.990%", "60.00%", ""]]
    assert ended["environment"] == [("gpu.driver.cuda", "13"), ("command", '["é"]')]
    assert ended["restarts"] == "0 resumes and restarts" and re.fullmatch(
        r"[-0-9]+ \d\d:\d\d UTC", ended["starts"][0][0]
    )
    state = json.loads((tmp_path / "state.json").read_text())
    state["starts"][0]["time"] = "soon"
    (tmp_path / "state.json").write_text(json.dumps(state))
    monkeypatch.chdir(tmp_path)
    write_run_report(Path(), Path("report.html"))
    page = Page(Path("report.html").read_text())
    assert (
        f"{tmp_path.name}\n" in page.text and f"{tmp_path} · written" in page.text and "soon\n" in page.text
    )
    begun = run_values(tmp_path, History())
    assert begun["headline"] == "–" and begun["verifications"] is None and begun["tiles"] == []


@pytest.mark.parametrize(
    ("weight", "panels"),
    [
        (None, ["loss", "accuracy", "lr", "images_per_s"]),
        (1, ["loss", "accuracy", "lr", "images_per_s", "distill_loss"]),
        (0, ["distill_loss", "accuracy", "lr", "images_per_s"]),
    ],
)
def test_the_curves_are_of_the_loss_that_is_trained_and_of_the_one_beside_it(
    tmp_path, undrawn, weight, panels
):
    distill = {"distill": {"teacher": "x", "loss": "cosine", "margin_weight": weight}}
    config = build_config({"data": {"train": "x"}} | (distill if weight is not None else {}), "test")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "environment.json").write_text("{}")
    history = History()
    history.add({"step": 1, "loss": 5.0} | ({"distill_loss": 0.25} if weight is not None else {}))
    found = run_values(tmp_path, history)
    assert found["curves"] == [f"curve-{panel}" for panel in panels]
    assert (
        found["headline"] == ("0.2500" if weight == 0 else "5.0000")
        and found["words"] == "loss; failed at step 1"
    )


def test_a_part_of_the_preset_that_the_run_has_switched_off_is_a_difference(folder):
    changes = ["optim.muon=null", "data.train=x"]
    (folder / "config.yaml").write_text(dump_config(load_config("quickstart", changes)))
    write_run_report(folder, folder / "report.html")
    assert re.search(r"optim.muon\n.*\nnull\n", Page((folder / "report.html").read_text()).text)


def test_names_are_escaped_and_nothing_is_loaded_from_elsewhere(text):
    page = Page(text)
    assert "script" not in page.tags and "<b>bold" not in text and EVIL in page.text
    assert not {"link", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        # SVG refers to its own parts: url(#…) and #….
        assert name.startswith("xmlns") or "://" not in (value or ""), (name, value)
        assert name not in ("href", "xlink:href") or value.startswith("#")
        assert name != "src" or value.startswith("data:image/jpeg;base64,")


def test_the_page_shows_the_first_batch_and_the_hardest_pairs(folder, text):
    assert "First batch" in text and "at step 20" in text and "pair 7: 0.125" in text
    assert Page(text).tags.count("img") == 3
    (folder / "hardest_pairs.json").write_text(
        '{"step": 1, "sets": {"x": {"genuine": [{"images": ["<b>"]}]}}}'
    )
    (folder / "augmented.png").write_bytes(b"no image")
    write_run_report(folder, folder / "report.html")
    assert "img" not in Page((folder / "report.html").read_text()).tags, "damaged files are left out"


def test_the_page_of_a_run_refreshes_itself_as_long_as_it_trains(folder, text, monkeypatch):
    refreshes = ("http-equiv", "refresh")
    assert refreshes not in Page(text).attributes
    monkeypatch.setattr(run_state, "is_locked", lambda folder: True)

    def train():
        write_run_report(folder, folder / "report.html")
        return 0

    train_recorded(folder, Start(step=20, ranks=2, device="cpu"), 40, train)
    assert refreshes in Page((folder / "report.html").read_text()).attributes


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {train: x}\n")
    (tmp_path / "environment.json").write_text("not JSON")
    printed = facetrain("report", tmp_path, "--output", tmp_path / "page.html").stdout
    assert printed == f"{tmp_path}/page.html\n"
    assert "Environment" in (tmp_path / "page.html").read_text()


def test_a_config_that_cannot_be_read_does_not_hide_the_rest(folder):
    (folder / "config.yaml").write_text("optim: {rate: 3}\n")
    write_run_report(folder, folder / "report.html")
    assert "optim.rate is not a key" in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "others"), [("augmented.png", 2), ("hardest_pairs.json", 1)])
def test_a_pipe_in_place_of_a_picture_or_of_pairs_is_left_out_and_not_waited_for(folder, name, others):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    # In another process: a reader that waits for the pipe can be ended.
    done = facetrain("report", folder, "--output", folder / "report.html")
    assert done.returncode == 0, done.stderr
    assert Page((folder / "report.html").read_text()).tags.count("img") == others


def test_a_folder_without_a_run_is_an_error_that_names_the_run_of_a_fine_tuning(tmp_path):
    with pytest.raises(
        UsageError, match=r"config\.yaml and environment\.json; `facetrain runs` lists the runs"
    ):
        write_run_report(tmp_path, tmp_path / "report.html")
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "environment.json"):
        (tmp_path / "run" / name).touch()
    with pytest.raises(UsageError, match=f"; its run is {tmp_path / 'run'}$"):
        write_run_report(tmp_path, tmp_path / "report.html")
