"""The Python interface in the programs that people call it from: a script, standard input, a notebook."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from facetrain.data.synthetic.dataset_writer import write_synthetic
from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.data.synthetic.options import SyntheticFaces
from tests.support.command import ROOT, environment

# Without `if __name__ == "__main__":`, as in a notebook. The training processes must not run it again.
PROGRAM = """
import facetrain, os, sys
assert "torch" not in sys.modules
print("program starts", flush=True)
try:
    facetrain.train({"data": {"train": "nowhere"}, "model": {"backbone": "r51"}})
except facetrain.errors.ConfigError as error:
    print("refused:", error)
config = {
    "run": {"name": "api"},
    "data": {"train": "elsewhere", "num_classes": 7, "image_size": 32, "workers": 2},
    "model": {
        "backbone": "iresnet", "layers": [1, 1, 1, 1], "widths": [8, 8, 8, 8], "embedding_size": 16,
    },
    "train": {"global_batch_size": 8, "max_steps": 9, "precision": "fp32", "device": "cpu"},
    "eval": {"targets": ["lfw"]},
    "log": {"tensorboard": False, "report": False},
}
run = facetrain.train(config, dataset="faces", train={"max_steps": 4}, **{"log.every_steps": 1})
run = facetrain.resume(run, train={"max_steps": 6})
assert len(facetrain.Dataset("faces")) == 48
result = facetrain.evaluate(run, "synth", bootstrap=0)["synth"]
print("steps", max(line["step"] for line in run.metrics()), "accuracy", result["accuracy"])
print("spins", os.environ["GOMP_SPINCOUNT"])
print("again in", facetrain.train(config, dataset="faces", train={"max_steps": 1}).folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("program.py", id="a script", marks=pytest.mark.long),
        pytest.param("-", id="standard input"),
    ],
)
def test_a_program_without_a_guard_trains_with_reading_processes(tmp_path, source):
    (tmp_path / "program.py").write_text(PROGRAM)
    faces = SyntheticFaces(
        identities=12, images_per_identity=4, eval_identities=6, eval_pairs=20, image_size=32
    )
    write_synthetic(tmp_path / "faces", faces, workers=1)
    process = subprocess.run(
        [sys.executable, source], input=PROGRAM,
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("program starts") == 1
    assert "steps 6 accuracy 0." in process.stdout or "steps 6 accuracy 1.0" in process.stdout
    assert "refused: config: model.backbone: r51" in process.stdout
    assert "\nspins 10000\n" in process.stdout, "it has loaded torch itself"
    assert "-2\n" in process.stdout.partition("again in")[2]
    assert "Traceback" not in process.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(ROOT / "docs" / "examples" / "quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    text = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "(16, 128)" in text and "bacth_size is not a key" in text
    assert Path(tmp_path / "runs" / "notebook" / "model.safetensors").is_file()


def documented_python(page, heading, end):
    """Return the indented code between two texts of a page."""
    section = (ROOT / page).read_text().partition(f"{heading}\n")[2].partition(end)[0]
    return "\n".join(line[4:] for line in section.splitlines() if line.startswith("    ") or not line)


@pytest.mark.slow
def test_the_first_python_of_the_readme_and_of_the_page_of_the_api_runs(tmp_path):
    faces = SyntheticFaces(
        identities=40, images_per_identity=4, eval_identities=10, eval_pairs=20, image_size=48
    )
    write_synthetic(tmp_path / "data" / "quickstart", faces, workers=1)
    (tmp_path / "faces").mkdir()
    for place in ("a.jpg", "b.jpg", "faces/c.jpg"):
        (tmp_path / place).write_bytes(draw_jpeg(0, 1, len(place), 48))
    readme = documented_python("README.md", "## In Python", "\n## ")
    page = documented_python("docs/api.md", "# Python API", "\n[The notebook]")
    # Both begin with the same training, and its evaluation: once is enough.
    lines = {line.partition("  #")[0].rstrip(): line for line in f"{readme}\n{page}".splitlines()}
    (tmp_path / "program.py").write_text(
        "\n".join(lines) + "\n"
        "print(tuple(embedding_ND.shape), quality_N.shape, loss.ndim, image.shape, image.dtype, type(label))\n"
    )
    process = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("(1, 128) (1,) 0 (48, 48, 3) uint8 <class 'int'>\n"), process.stdout
