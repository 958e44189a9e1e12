"""Names from files, on the terminal and in pages: escape sequences, line breaks, overrides of the direction, markup."""

import io
import re
import sys

import numpy as np
import pytest

from facetrain.cli.app import app
from facetrain.cli.bench import print_report
from facetrain.cli.progress_bar import progress_bar
from facetrain.embeddings.embedding_files import save_embeddings
from facetrain.embeddings.embeddings import Embeddings
from facetrain.errors import FacetrainError
from tests.support.datasets import encoded_image
from tests.support.models import write_model

NAME = "ann\x1b[2J\x1b]0;title\x07\nforged: line\u202e<script>alert(1)</script>"
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f\x9b\u202a-\u202e\u2066-\u2069]|^forged", re.M)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with the name in a dataset, in tables, in embeddings and in a run."""
    folder, name = tmp_path_factory.mktemp("hostile"), NAME.replace("/", "\u2215")
    for number, identity in enumerate((name, "bob")):
        (folder / "photos" / identity).mkdir(parents=True)
        for image in range(2):
            data = encoded_image(2 * number + image, 32)
            (folder / "photos" / identity / f"{image}{name}.png").write_bytes(data)
        (folder / "photos" / identity / f"{name}.txt").write_text("no image")
        (folder / "photos" / identity / f"damaged {name}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [f'{n / 40},{n % 2},"{NAME if n % 3 else "b"}"' for n in range(40)]
    (folder / "scores.csv").write_text(f'score,genuine,"{NAME}"\n' + "\n".join(rows) + "\n", newline="")
    unit = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    save_embeddings(
        folder / "a.npz", Embeddings(unit, [f"{NAME}{n}" for n in range(4)], np.array([0, 0, 1, 1]))
    )
    config = {"data": {"train": NAME, NAME: 1}}
    licensed = [{"name": NAME, "license": NAME}]
    write_model(folder / f"{name}.safetensors", origin=NAME, config=config, datasets=licensed)
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("data: {train: none}\neval: {targets: []}\n")
    (run / "environment.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (run / "log.txt").write_text(f"2026-11-22 00:00:00,000 rank 0 WARNING {NAME}\n")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "inspect", "photos"],
        ["data", "check", "photos"],
        ["data", "pack", "photos", "--output", "packed"],
        ["eval", "--scores", "scores.csv", "--bootstrap", "40"],
        ["search", "a.npz", "a.npz"],
        ["runs", "runs"],
        ["report", "runs/NAME"],
        ["export", "NAME.safetensors", "--format", "safetensors", "--output", "NAME.copy.safetensors"],
        ["plan", "--config", "runs/NAME/config.yaml", "--memory", "80"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_no_command_prints_a_control_character_of_a_name(files, monkeypatch, capfd, arguments):
    monkeypatch.chdir(files)
    arguments = [one.replace("NAME", NAME.replace("/", "\u2215")) for one in arguments]
    message = ""
    try:
        app(arguments, standalone_mode=False)
    except FacetrainError as error:  # the command itself prints it by `printable`
        from facetrain.text import printable

        message = printable(str(error))
    except SystemExit:
        pass
    shown = capfd.readouterr()
    text = shown.out + message + re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", shown.err)
    assert not FORBIDDEN.search(text), FORBIDDEN.search(text)
    assert "forged" in text or arguments[0] in ("data",)


def replace_terminal(monkeypatch, kind):
    """Return what stands for the terminal. No fixture: pytest sets `sys.stderr` again after those."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", kind)
    return terminal


def test_a_progress_bar_shows_a_title_with_brackets(monkeypatch):
    terminal = replace_terminal(monkeypatch, "xterm")
    with progress_bar("embedding [old]/a [/b]") as progress:
        assert "embedding" not in terminal.getvalue()
        progress(1, 2)
    assert "embedding [old]/a [/b]" in terminal.getvalue()


def test_a_terminal_that_draws_no_bar_gets_no_control_characters(monkeypatch):
    terminal = replace_terminal(monkeypatch, "dumb")
    with progress_bar("embedding") as progress:
        progress(1, 2)
    assert terminal.getvalue() == "", "a line after ten seconds"


@pytest.mark.slow
def test_pages_escape_names_in_markup(files):
    run = files / "runs" / NAME.replace("/", "\u2215")
    page = files / "page.html"
    app(["report", str(run), "--output", str(page)], standalone_mode=False)
    outputs = ["--report", str(files / "report"), "--bootstrap", "40"]
    app(["eval", "--scores", str(files / "scores.csv"), *outputs], standalone_mode=False)
    pages = [page, *(files / "report").rglob("*.html")]
    assert len(pages) == 2
    for one in pages:
        text = one.read_text()
        assert "<script" not in text and "&lt;script" in text
        assert "\x1b" not in text


def test_a_benchmark_prints_no_control_character_of_a_name(capsys):
    print_report({NAME: {"model": NAME}, "data": NAME}, as_json=False)
    text = capsys.readouterr().out
    assert not FORBIDDEN.search(text) and text.count("forged") == 3
