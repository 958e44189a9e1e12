"""Files of other people that name code: no command imports it."""

import sys
from functools import partial

import pytest
import torch

import facetrain
from facetrain import own_parts
from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.errors import ConfigError
from facetrain.models.model_file import describe_backbone, save_model
from tests.support.command import output_of, refusal
from tests.support.models import write_model

PLACE = "code_of_others:Net"
NETWORK = """
import torch

def Net(embedding_size, image_size):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * image_size**2, embedding_size))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Folder with a model that names code, with this code, a usual model, photos and a dataset."""
    (tmp_path / "code_of_others.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    description = describe_backbone(PLACE, embedding_size=16, image_size=32)
    save_model(tmp_path / "theirs.safetensors", {"weight": torch.zeros(2)}, description)
    write_model(tmp_path / "ours.safetensors")
    for person in range(25):
        (tmp_path / "photos" / f"p{person}").mkdir(parents=True)
        for photo in range(4):
            (tmp_path / "photos" / f"p{person}" / f"{photo}.jpg").write_bytes(draw_jpeg(0, person, photo, 32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_parts, "_allowed", set())
    # Otherwise the code of an earlier test counts as imported.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "code_of_others", raising=False)
    return tmp_path


THEIRS, OURS, PHOTO = "theirs.safetensors", "ours.safetensors", "photos/p0/0.jpg"


@pytest.mark.parametrize(
    "command",
    [
        ["eval", THEIRS, "--target", "photos"],
        ["eval", OURS, "--target", "photos", "--against", THEIRS],
        ["export", THEIRS, "--output", "model.onnx"],
        ["embed", THEIRS, "photos", "--output", "embeddings.npz"],
        ["compare", THEIRS, PHOTO, "photos/p1/0.jpg"],
        ["search", "photos", PHOTO, "--model", THEIRS],
        ["calibrate", THEIRS, "--people", "photos"],
        ["average", THEIRS, OURS, "--output", "average.safetensors"],
        ["align", OURS, THEIRS, "photos", "--output", "map.npz"],
        ["align", THEIRS, OURS, "photos", "--output", "map.npz"],
        ["finetune", "photos", "--model", THEIRS, "--output", "tuned"],
        ["data", "clean", THEIRS, "photos", "--output", "cleaned"],
        ["train", "--preset", "quickstart", "--data", "photos", "--batch", 8, "--set",
         f"distill.teacher={THEIRS}"],
    ],
    ids=lambda command: " ".join(command[:3]),
)  # fmt: skip
def test_a_model_that_names_code_runs_it_in_no_command(home, command):
    error = refusal(*command)
    assert isinstance(error, ConfigError), error
    assert error.exit_code == 2 and PLACE in str(error) and "--allow-code" in str(error), error
    assert not (home / "imported").exists()


@pytest.mark.parametrize(
    "load", [facetrain.load_model, lambda path, **options: facetrain.Run(path).load_model(**options)]
)
def test_load_model_runs_code_only_if_it_is_allowed(home, load):
    with pytest.raises(ConfigError, match=f"theirs.safetensors.*{PLACE}"):
        load(home / THEIRS)
    assert not (home / "imported").exists()
    with pytest.raises(ConfigError, match=PLACE):  # the module has no Net
        load(home / THEIRS, allow_code=True)
    assert (home / "imported").exists()


@pytest.mark.parametrize("models", [{"model": THEIRS}, {"model": OURS, "gallery_model": THEIRS}])
def test_evaluate_runs_code_only_if_it_is_allowed(home, models):
    with pytest.raises(ConfigError, match=f"theirs.safetensors.*{PLACE}.*allow_code=True"):
        facetrain.evaluate(**models, sets="photos")
    with pytest.raises(ConfigError, match=f"{PLACE}: .*code_of_others.py has no such function"):
        facetrain.evaluate(**models, sets="photos", allow_code=True)


def test_train_runs_the_code_of_a_teacher_only_if_it_is_allowed(home):
    teacher = {"distill.teacher": THEIRS, "train.batch_size": 8, "train.global_batch_size": None}
    train = partial(facetrain.train, "quickstart", "run", dataset="photos", **teacher)
    with pytest.raises(ConfigError, match=f"theirs.safetensors.*{PLACE}.*allow_code=True"):
        train()
    with pytest.raises(ConfigError, match=f"{PLACE}: .*code_of_others.py has no such function"):
        train(allow_code=True)
    with pytest.raises(ConfigError, match="allow_code=True"):
        facetrain.load_model(THEIRS)


def test_a_benchmark_runs_the_code_that_its_command_line_names(home):
    error = refusal("bench", "train", "--set", f"model.backbone={PLACE}", "--nproc-per-node", 1)
    assert PLACE in str(error) and "code_of_others.py has no such function" in str(error), error


@pytest.mark.slow
def test_the_next_command_allows_the_code_of_its_model(home):
    (home / "code_of_others.py").write_text(NETWORK)
    weights = {"network.1.weight": torch.randn(16, 3 * 32 * 32), "network.1.bias": torch.zeros(16)}
    description = describe_backbone(PLACE, embedding_size=16, image_size=32)
    save_model(home / THEIRS, weights, description)

    def next_command(*command):
        return output_of(*command, "--allow-code", cwd=home).splitlines()[-1]

    compare = next_command("calibrate", THEIRS, "--people", "photos", "--fmr", 0.1)
    assert compare == f"next: facetrain compare {THEIRS} A.jpg B.jpg --allow-code"
    search = next_command("align", THEIRS, OURS, "photos", "--output", "map.npz")
    assert search == f"next: facetrain search GALLERY PROBES --model {OURS} --map map.npz"
