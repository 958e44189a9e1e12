"""Help of the program: complete, and fast because no command is imported for it."""

import subprocess
import sys

import pytest
import typer

from facetrain.cli.app import app

PROGRAM = typer.main.get_command(app)


@pytest.mark.parametrize("name", PROGRAM.list_commands(None))
def test_the_summary_in_the_source_of_a_command_is_that_of_its_own_help(name):
    assert PROGRAM.summary(name) == PROGRAM.commands[name].help.partition("\n")[0] != ""


def test_the_help_imports_no_command_and_nothing_that_is_slow():
    code = (
        "import sys\nfrom facetrain.cli.app import main\nsys.argv = ['facetrain', '--help']\n"
        "try: main()\nexcept SystemExit: print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES")
    assert all(f"\n  {name} " in text for name in PROGRAM.list_commands(None))
    slow = {"numpy", "torch", "pydantic", "rich", "cv2", "facetrain.cli.evaluate", "facetrain.cli.data"}
    assert not slow & set(modules.split())


def test_no_command_is_answered_with_the_help():
    done = subprocess.run([sys.executable, "-m", "facetrain", "data"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Usage: facetrain data [OPTIONS] COMMAND")
