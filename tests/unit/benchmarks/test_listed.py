"""Every benchmark is listed in docs/benchmarks.md, and `make bench` runs those that need no files."""

import re

from facetrain.cli.bench import app
from tests.support.command import ROOT

NEED_FILES = {"arcface_torch_training", "clean", "same_minutes"}
COMMANDS = {f"facetrain bench {command.callback.__name__}" for command in app.registered_commands}
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "common"}


def test_every_benchmark_is_listed_in_the_docs():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in COMMANDS | {f"-m benchmarks.{name}" for name in SCRIPTS}:
        assert f"{name}`" in text or f"{name} " in text, name


def test_make_bench_runs_every_benchmark_that_needs_no_files():
    text = (ROOT / "scripts" / "bench").read_text()
    for name in COMMANDS | {f"-m benchmarks.{name}" for name in SCRIPTS - NEED_FILES}:
        assert f"{name} " in text, name


def test_the_package_needs_neither_benchmarks_nor_tests():
    for path in (ROOT / "facetrain").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) (benchmarks|tests)\b", path.read_text(), re.MULTILINE), path
