"""The speedrun's recipes and their runner, without training."""

import json
import runpy
from pathlib import Path

import pytest

from facetrain.config.loading import load_config
from tests.support.command import ROOT
from tests.support.command_lines import complaint

FOLDER = ROOT / "recipes" / "speedrun"


@pytest.fixture
def runner():
    return runpy.run_path(str(FOLDER / "run.py"))


def test_every_recipe_has_a_config(runner):
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(runner["RECIPES"])
    for recipe in runner["RECIPES"]:
        assert load_config(FOLDER / f"{recipe}.yaml").run.name == recipe


def test_a_run_is_trained_with_an_empty_cache_then_evaluated_and_kept(runner, tmp_path, monkeypatch):
    commands, run = [], tmp_path / "speedrun_3"
    (run / "checkpoints").mkdir(parents=True)  # of a call that was interrupted

    def pretend(command, *, check, env):
        assert check and command[1:3] == ["-m", "facetrain"]
        commands.append(command[3:])
        if command[3] == "train":
            assert not run.exists() and command[command.index("--run-dir") + 1] == str(run)
            cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
            assert cache.is_dir() and not list(cache.iterdir())
        else:
            metrics = {runner["LFW"]: {"accuracy": 0.87, "eer": 0.125}}
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"sets": metrics}))

    monkeypatch.setattr("subprocess.run", pretend)
    result = runner["run_seed"]("speedrun", 3, Path("data/real"), tmp_path)
    assert (result.seed, result.accuracy, result.eer) == (3, 0.87, 0.125)
    assert result.seconds > 0
    assert [command[0] for command in commands] == ["train", "eval"]
    assert [reason for command in commands if (reason := complaint(command, complete=True))] == []
    assert "seed=3" in commands[0]
    assert runner["run_seed"]("speedrun", 3, Path("data/real"), tmp_path) == result
    assert len(commands) == 2
    runner["run_seed"]("speedrun", 3, Path("data/other"), tmp_path)
    assert len(commands) == 4
    for name in ("speedrun", "best"):  # a recipe that was changed
        (tmp_path / "speedrun.yaml").write_text((FOLDER / f"{name}.yaml").read_text())
        monkeypatch.setitem(runner["run_seed"].__globals__, "FOLDER", tmp_path)
        runner["run_seed"]("speedrun", 3, Path("data/other"), tmp_path)
    assert len(commands) == 6


def test_the_table_has_all_runs_and_their_means(runner):
    result = runner["Result"]
    rows = runner["table"](
        "speedrun", [result(1, 100.4, 0.86, 0.13), result(2, 120.2, 0.88, 0.12)]
    ).splitlines()
    assert rows[2:] == [
        "| seed 1 | 100 | 86.00 | 13.00 |",
        "| seed 2 | 120 | 88.00 | 12.00 |",
        "| mean | 110 ± 14.0 | 87.00 ± 1.4 | 12.50 ± 0.7 |",
    ]
    assert runner["table"]("plain", [result(1, 1800.4, 0.86, 0.13)]).endswith(
        "| mean | 1800 | 86.00 | 13.00 |"
    )
