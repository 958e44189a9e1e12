"""Runs that are started, continued and evaluated from different folders."""

import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.support.command import environment, facetrain


@pytest.mark.slow
def test_a_run_with_relative_paths_is_continued_and_evaluated_from_another_folder(
    describe, dataset, tmp_path
):
    text = describe(steps=8).read_text()
    text = text.replace(f"{dataset}/data", "data").replace(f"{tmp_path}/runs", "runs")
    text = text.replace("targets: [val]", "targets: [val, sets/val2.bin]")
    project = tmp_path / "project"
    (project / "sets").mkdir(parents=True)
    (project / "tiny.yaml").write_text(text)
    (project / "data").symlink_to(dataset / "data")
    (project / "sets" / "val2.bin").symlink_to(dataset / "data" / "val.bin")

    trained = facetrain("train", "--config", "tiny.yaml", cwd=project)
    assert trained.returncode == 0, trained.stderr
    written = (project / "runs" / "tiny" / "config.yaml").read_text()
    config = yaml.safe_load(written)
    assert config["data"]["train"] == str(project / "data") and config["run"]["dir"] == str(project / "runs")
    assert config["eval"]["targets"] == ["val", str(project / "sets" / "val2.bin")]

    (tmp_path / "elsewhere").mkdir()
    resumed = facetrain(
        "resume", "../project/runs/tiny", "--set", "train.max_steps=12", cwd=tmp_path / "elsewhere"
    )
    assert resumed.returncode == 0, resumed.stderr
    evaluated = facetrain(
        "eval", "../project/runs/tiny", "--target", "val", "--bootstrap", 0, cwd=tmp_path / "elsewhere"
    )
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        pytest.param((), id="one process", marks=pytest.mark.long),
        pytest.param(("--max-restarts", "1"), id="launcher and rank"),
    ],
)
def test_parts_in_the_current_folder_are_found_and_its_other_files_replace_no_module(
    launch, describe, tmp_path
):
    (tmp_path / "own_margin.py").write_text("def margin(cos):\n    return cos - 0.3\n")
    for name in (
        "socket",
        "yaml",
        "sitecustomize",
    ):  # of the standard library, of a package, of the start of Python
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\nraise ImportError\n")
    config = describe(workers=1, steps=2)
    command = [Path(sysconfig.get_path("scripts"), "facetrain"), "train", "--config", config]
    command += ["--set", "head.margin={type: 'own_margin:margin'}", *launch]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
