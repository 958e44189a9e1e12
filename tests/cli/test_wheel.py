"""The wheel, unpacked outside the repository: presets, types, metadata, and a short training run."""

import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest

from tests.support.command import ROOT, environment
from tests.support.installer import pip, uv


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    if path := uv():
        build = [path, "build", "--wheel", "--out-dir", str(folder), str(ROOT)]
    else:
        build = [*pip(), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site-packages")
    for name in ("configs/r50.yaml", "datasets/glint360k.card.yaml"):  # as another package may install them
        (folder / "site-packages" / name).parent.mkdir()
        (folder / "site-packages" / name).write_bytes(b"\xff")
    return folder / "site-packages"


def run(wheel, folder, *arguments):
    process = subprocess.run(
        [sys.executable, "-P", "-m", "facetrain", *arguments],
        cwd=folder,
        env=environment(PYTHONPATH=str(wheel)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_the_wheel_has_presets_types_and_metadata(wheel, tmp_path):
    presets = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert presets == {path.name for path in (wheel / "facetrain" / "config" / "presets").glob("*.yaml")}
    assert (wheel / "facetrain" / "py.typed").is_file()
    (text,) = wheel.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(text.read_text())
    assert {"all", "onnx", "parquet", "remote"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Summary"] and metadata["Author"] and metadata["Keywords"]
    assert "ms1mv3_r50 " in run(wheel, tmp_path, "config", "list")
    assert "  yunet " in run(wheel, tmp_path, "get")
    assert "backbone: r100" in run(wheel, tmp_path, "config", "show", "glint360k.yaml")
    cards = {path.name for path in (ROOT / "datasets").glob("*.card.yaml")}
    assert cards == {path.name for path in (wheel / "facetrain/data/published_cards").glob("*.card.yaml")}


@pytest.mark.slow
def test_the_wheel_trains_a_preset_outside_the_repository(wheel, tmp_path):
    small = "--identities 12 --images-per-identity 4 --eval-identities 6 --eval-pairs 20 --image-size 32"
    run(wheel, tmp_path, "data", "synth", "--output", "data/quickstart", *small.split())
    options = [
        "train.max_steps=3",
        "train.global_batch_size=8",
        "data.image_size=32",
        "train.device=cpu",
    ]
    sets = [part for option in options for part in ("--set", option)]
    assert "finished" in run(wheel, tmp_path, "train", "--config", "quickstart", *sets)
    assert (tmp_path / "runs" / "quickstart" / "model.safetensors").is_file()
