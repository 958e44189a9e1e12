"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "facetrain"

LAYERS = [
    {"errors", "counter", "parts"},
    {"distributed"},
    {"data", "backbone", "head", "optim", "telemetry"},
    {"checkpoint", "verify", "export"},
    {"train"},
    {"build", "open_data"},
    {"resumable"},
    {"run", "doctor", "plan", "bench"},
    {"cli"},
]
# `config` stands beside: it knows the errors, and whoever builds from it, examines it or reads it.
CONFIG_KNOWN_BY = {"build", "open_data", "resumable", "run", "doctor", "plan", "bench", "cli", "config"}
# Siblings that know each other, and why.
SIBLINGS = {
    ("verify", "checkpoint"),  # a model to score comes from a checkpoint or a model file
    ("export", "checkpoint"),  # as does one to export
    ("doctor", "run"),  # examines the plan of a run without starting it
    ("doctor", "plan"),  # and what it will need
    ("bench", "plan"),  # whose count of operations tells how near to its limit a machine comes
}
MODULES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer(name: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if name in rooms)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    here = room(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "facetrain" or len(parts) < 2 or parts[1] == here or here in ("__main__", "__init__"):
            continue
        there = parts[1]
        if there == "config":
            assert here in CONFIG_KNOWN_BY, f"{path}: knows the config"
        elif here == "config":
            assert there == "errors", f"{path}: the config knows errors alone, not {name}"
        elif there in {room for rooms in LAYERS for room in rooms}:
            assert layer(there) < layer(here) or (here, there) in SIBLINGS, (
                f"{path}: {here} may not know {name}"
            )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_environment_and_the_process_group_are_known_in_one_place(path):
    text = path.read_text()
    if room(path) != "distributed":
        assert "os.environ" not in text and "getenv" not in text, f"{path}: reads the environment"
        assert "import torch.distributed as" not in text and "from torch import distributed" not in text, path


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_loaded_can_run(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in {
            "pickle.load",
            "pickle.loads",
            "pickle.Unpickler",
            "eval",
            "exec",
            "yaml.unsafe_load",
        }, path
        if called == "torch.load":
            assert "weights_only=True" in ast.unparse(node), path
        if called in {"np.load", "numpy.load"}:
            assert "allow_pickle=True" not in ast.unparse(node), path


def test_reading_and_changing_datasets_takes_no_torch():
    tools = [f"facetrain.data.tools.{path.stem}" for path in (ROOT / "data" / "tools").glob("[!_]*.py")]
    loaded = "facetrain.data.worker", "facetrain.data.synthetic.write", *sorted(tools)
    script = f"import sys, {', '.join(loaded)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
