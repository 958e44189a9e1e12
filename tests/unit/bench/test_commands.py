"""Every benchmark is listed in docs/benchmarks.md, and `make bench` runs those that need no files."""

import pytest

from facetrain.cli.bench import app
from tests.support.command import ROOT

NEED_FILES = {"clean"}
COMMANDS = {command.name for command in app.registered_commands}


@pytest.mark.parametrize("name", sorted(COMMANDS - NEED_FILES))
def test_a_benchmark_that_needs_no_files_is_part_of_make_bench(name):
    assert f"\nbench {name} " in (ROOT / "scripts" / "bench").read_text()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_benchmark_is_listed_in_the_docs(name):
    assert f"`facetrain bench {name}" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_commands_are_found():
    assert {"loader", "head", "backbone", "train", "scaling", "verification", "clean"} <= COMMANDS
