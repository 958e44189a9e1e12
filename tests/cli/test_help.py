"""Help of the program: complete, and fast because no command is imported for it."""

import subprocess
import sys

import pytest
import typer

from facetrain.cli.app import app
from tests.support.command import output_of

PROGRAM = typer.main.get_command(app)


@pytest.mark.parametrize("name", PROGRAM.list_commands(None))
def test_the_summary_in_the_source_of_a_command_is_that_of_its_own_help(name):
    assert PROGRAM.summary(name) == PROGRAM.commands[name].help.partition("\n")[0] != ""


LARGE = {"torch", "cv2", "matplotlib", "sklearn"}
COMMANDS = {"numpy", "pydantic", "rich", "facetrain.cli.evaluate", "facetrain.cli.data"}


@pytest.mark.parametrize(
    ("line", "slow"),
    [("--help", LARGE | COMMANDS), ("train -h", LARGE), ("data pack -h", LARGE), ("eval -h", LARGE)],
)
def test_the_help_imports_nothing_that_is_slow(line, slow):
    code = (
        "import sys\nfrom facetrain.cli.app import main\n"
        "try: main()\nexcept SystemExit: print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True)
    text, _, modules = done.stdout.partition("MODULES")
    assert text and modules and not slow & set(modules.split()), done.stderr


def test_the_short_option_prints_the_help_which_lists_all_commands():
    for command in ((), ("data", "pack")):
        assert output_of(*command, "-h") == output_of(*command, "--help") != ""
    text = output_of("--help")
    assert all(f"\n  {name} " in text for name in PROGRAM.list_commands(None))
    assert "--install-completion" in text


def test_no_command_is_answered_with_the_help():
    done = subprocess.run([sys.executable, "-m", "facetrain", "data"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Usage: facetrain data [OPTIONS] COMMAND")
