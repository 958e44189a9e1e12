"""The documentation: the site builds, and the links, command lines and config keys in it exist."""

import re
import shlex
import subprocess
import sys
from html import escape

import pytest
import typer

import facetrain
from facetrain.cli.app import app
from facetrain.config.schema import Config
from scripts.mkdocs_hooks import commands
from tests.support.command import ROOT, environment
from tests.support.command_lines import CONFIG_KEYS, complaint

# The log names the commands and files of its days.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "log"),
]
GENERATED = {ROOT / "docs" / "commands.md", ROOT / "docs" / "contributing.md"}
# Files whose names look like keys of a section.
FILE_ENDINGS = (
    ".mdb",
    ".rec",
    ".idx",
    ".txt",
    ".pt",
    ".onnx",
    ".parquet",
    ".safetensors",
    ".lock",
    ".yaml",
    ".json",
    ".jsonl",
    ".md",
    ".py",
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_lines(text):
    """Yield the lines of indented and of fenced code blocks; a line that ends in a backslash includes the next one."""
    fenced = False
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip()


def inline_code(text):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def words_of_command(line):
    """Return the words behind `facetrain` of a command line in a page; None if there is no command in it."""
    found = re.match(r"(?:torchrun .* -m |(?:\S+/)?(?:python3? -m )?)facetrain (?=[a-z-])(.*)", line)
    if not found:
        return None
    # Up to a remark, a redirection or the next command; an optional part in brackets counts.
    command = re.split(r"\s#|\s{2,}| > | \| |; ", found[1])[0]
    command = re.sub(r"\[([^]=]*)\]", r"\1", command)
    return [word for word in shlex.split(command) if word != "…"]


@each_page
def test_links_and_images_exist(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    paths = [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert [str(path) for path in paths if not path.exists() and path not in GENERATED] == []


@each_page
def test_named_files_of_this_repository_exist(page):
    text = page.read_text(encoding="utf-8")
    named = [code for code in inline_code(text) if re.fullmatch(r"(facetrain|tests)/[\w/]+\.py", code)]
    named += re.findall(r"(?<![\w/])configs/[\w.]+\.yaml", text)
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []


def test_contributing_has_each_instruction_that_the_readme_announces():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    announced = re.search(r"and how to add a (.+?)\.", readme)[1]
    headings = re.findall(r"^## How to add an? (.+)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    wanted = [re.sub(r"^an? ", "", name) for name in re.split(r", | or ", announced)]
    assert len(wanted) == 5 and set(wanted) <= set(headings)


@each_page
def test_command_lines_parse(page):
    text = page.read_text()
    found = [(words_of_command(line), True) for line in code_lines(text)]
    found += [(words_of_command(line), False) for line in inline_code(text)]
    commands = [(words, complete) for words, complete in found if words]
    wrong = {shlex.join(words): complaint(words, complete=complete) for words, complete in commands}
    assert {line: reason for line, reason in wrong.items() if reason} == {}


def test_commands_that_messages_name_exist():
    wrong = {}
    for path in sorted((ROOT / "facetrain").rglob("*.py")):
        text = re.sub(r'"\n\s*f?"', "", path.read_text(encoding="utf-8"))  # strings over several lines
        for line in re.findall(r"`facetrain ([a-z][a-z -]*)", text):
            words = line.split()
            command = typer.main.get_command(app)
            while words and hasattr(command, "commands") and command is not None:
                command = command.get_command(None, words.pop(0))
            if command is None:
                wrong[str(path)] = line
    assert wrong == {}


@each_page
def test_config_keys_exist(page):
    named = {code.split(":")[0].split("=")[0].split(" ")[0] for code in inline_code(page.read_text())}
    top = "|".join(Config.model_fields)
    keys_named = {name for name in named if re.fullmatch(rf"({top})(\.[a-z_0-9]+)+", name)}
    assert {key for key in keys_named if not key.endswith(FILE_ENDINGS)} - CONFIG_KEYS == set()


def test_messages_in_troubleshooting_are_those_of_the_program():
    tables = (
        (ROOT / "docs" / "troubleshooting.md").read_text().split("| message | what to do |\n|---|---|\n")[1:]
    )
    messages = [row.split("`")[1] for table in tables for row in table.split("\n\n")[0].splitlines()]
    source = "".join(path.read_text() for path in (ROOT / "facetrain").rglob("*.py"))
    assert len(messages) >= 3
    assert [message for message in [*messages, "did not answer rank"] if message not in source] == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("facetrain eval MODEL --target lfw --rapport DIR", "rapport"),
        ("facetrain trian --config FILE", "no command trian"),
        ("facetrain plan", "missing"),
        ("facetrain resume RUN_DIR OTHER", "OTHER"),
        ("facetrain train --config FILE --set optim.rate=1", "no key optim.rate"),
    ],
)
def test_a_wrong_command_line_is_found(line, reason):
    assert reason in complaint(words_of_command(line), complete=True)


@pytest.mark.slow
def test_site_builds_without_warnings_and_without_the_network(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, env=environment(NO_MKDOCS_2_WARNING="1", HTTPS_PROXY="http://127.0.0.1:9"),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text()
        )
        assert loaded == [], page.name
    api = (tmp_path / "api.html").read_text()
    public = [name for name in facetrain.__all__ if name not in ("__version__", "errors", "PartialFC")]
    assert [name for name in public if f'id="facetrain.api.{name}"' not in api] == []
    assert 'id="facetrain.errors.FacetrainError"' in api
    assert 'id="facetrain.head.partial_fc.PartialFC"' in api
    reference = (tmp_path / "commands.html").read_text()
    for names, command in commands(typer.main.get_command(app), ("facetrain",)):
        words = " ".join(names)
        assert f">{words}<" in reference, words
        for option in command.params:
            names = option.opts[0], option.name.upper(), option.metavar or option.name
            assert any(escape(name) in reference for name in names), (words, option.name)
