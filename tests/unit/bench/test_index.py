"""Every measuring command stands in docs/benchmarks.md, and those that need no files are run by `make bench`."""

import ast

import pytest

from tests.support.command import ROOT

SAME = {"backbone", "loader"}  # as the commands of these names
NEED_FILES = {"clean"}
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.stem not in SAME
)
COMMANDS = [
    node.args[0].value
    for node in ast.walk(ast.parse((ROOT / "facetrain" / "cli" / "bench.py").read_text()))
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "command"
]


@pytest.mark.parametrize("name", [f"facetrain bench {command}" for command in COMMANDS] + SCRIPTS)
def test_a_measuring_command_is_in_the_short_run_and_in_the_index(name):
    called = name if name.startswith("facetrain") else f"python -m benchmarks.{name}"
    assert name in NEED_FILES or called in (ROOT / "scripts" / "bench").read_text()
    assert called in (ROOT / "docs" / "benchmarks.md").read_text()


def test_there_are_such_commands():
    assert {"loader", "head", "backbone", "train"} <= set(COMMANDS) and {"train", "scaling"} <= set(SCRIPTS)
