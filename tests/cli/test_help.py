"""Help of the program: complete, short, and fast because it imports nothing large."""

import subprocess
import sys

import pytest
import typer

from facetrain.cli.app import app
from tests.support.command import output_of

PROGRAM = typer.main.get_command(app)


LARGE = {"torch", "cv2", "matplotlib", "sklearn", "facetrain.config.schema"}


@pytest.mark.parametrize(
    ("line", "slow"),
    [("--help", LARGE), ("train -h", LARGE), ("data pack -h", LARGE), ("eval -h", LARGE)],
)
def test_the_help_imports_nothing_that_is_slow(line, slow):
    code = (
        "import sys\nfrom facetrain.cli.app import main\n"
        "try: main()\nexcept SystemExit: print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True)
    text, _, modules = done.stdout.partition("MODULES")
    assert text and modules and not slow & set(modules.split()), done.stderr


def test_the_first_page_is_short_and_begins_with_the_six_commands_that_make_the_job():
    assert output_of("-h") == output_of("--help")
    lines = output_of("--help").splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2].islower()]
    assert listed[:6] == ["train", "resume", "finetune", "eval", "export", "data"]
    assert sorted(listed) == sorted(PROGRAM.list_commands(None))
    assert len(lines) < 50


def test_no_command_is_answered_with_the_help():
    done = subprocess.run([sys.executable, "-m", "facetrain", "data"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Usage: facetrain data [OPTIONS] COMMAND")


def commands_of(command):
    yield command
    for name in getattr(command, "commands", ()):  # some are loaded when they are asked for
        yield from commands_of(command.get_command(None, name))


@pytest.mark.parametrize("command", [pytest.param(each, id=str(each.name)) for each in commands_of(PROGRAM)])
def test_arguments_have_names_in_capitals(command):
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    assert [each.name for each in arguments if not each.metavar or each.metavar != each.metavar.upper()] == []
