"""Who may import whom."""

import ast
import functools
import gc
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "facetrain"

DOCS = ROOT.parent


def layers() -> list[set[str]]:
    """Return the layers that CONTRIBUTING.md lists, lowest first."""
    section = (DOCS / "CONTRIBUTING.md").read_text().split("each line is a layer.")[1]
    lines = [line.split() for line in section.split("\n## ")[0].splitlines() if line.startswith("    ")]
    return [set(line) for line in reversed(lines)]


LAYERS = layers()
CONFIG_IMPORTS = {"errors", "files", "own_parts", "remote", "settings", "strict_yaml", "text"}
CONFIG_KNOWN_BY = set().union(*LAYERS[next(i for i, names in enumerate(LAYERS) if "run" in names) :])
MODULES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    gc.freeze()  # the garbage collector would look at millions of nodes again and again
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_settings(parts: list[str]) -> bool:
    """Return whether a module is the settings of a part, which any other module may import."""
    return parts[-1] == "settings" or parts[-2:-1] == ["settings"]


def layer(name: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if name in rooms)


def test_contributing_and_package_name_the_same_rooms():
    rooms = {room(path) for path in MODULES} - {"__init__", "__main__"}
    tree = (DOCS / "CONTRIBUTING.md").read_text().split("    facetrain/\n")[1].split("\n\n")[0]
    assert {line.split()[0].removesuffix("/").removesuffix(".py") for line in tree.splitlines()} == rooms
    assert set().union(*LAYERS) | {"config"} == rooms
    assert sum(len(names) for names in LAYERS) == len(rooms) - 1, "a room is listed twice"


def test_imports_go_downward():
    for path in MODULES:
        here = room(path)
        for name in imported(path):
            parts = name.split(".")
            if (
                parts[0] != "facetrain"
                or len(parts) < 2
                or parts[1] == here
                or here in ("__main__", "__init__")
            ):
                continue
            there = "settings" if is_settings(parts) else parts[1]
            if there == "config":
                assert here in CONFIG_KNOWN_BY, f"{path}: {here} must not import the config"
            elif here == "config":
                assert there in CONFIG_IMPORTS, f"{path}: config must not import {name}"
            elif there in {room for rooms in LAYERS for room in rooms}:
                assert layer(there) < layer(here), f"{path}: {here} must not import {name}"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for type checkers count, too: they tie the modules together all the same."""
    paths = {"facetrain." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    rest = {name: imported(path) & paths.keys() for name, path in paths.items()}
    # Remove modules that import nothing of the rest, or that nothing of the rest imports: circles are left.
    while free := {
        name for name in rest if not rest[name] & rest.keys() or name not in set().union(*rest.values())
    }:
        rest = {name: names for name, names in rest.items() if name not in free}
    assert not rest, f"these modules import each other in a circle: {sorted(rest)}"


def test_the_environment_and_the_process_group_are_known_in_one_place():
    for path in MODULES:
        text = path.read_text()
        if room(path) != "distributed":
            assert "os.environ" not in text and "getenv" not in text, f"{path}: reads the environment"
            assert (
                "import torch.distributed as" not in text and "from torch import distributed" not in text
            ), path


def test_nothing_that_is_loaded_can_run():
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and "Unpickler" in " ".join(map(ast.unparse, node.bases)):
                # The one exception: its find_class returns our own constructors only (test_bin.py).
                methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
                assert path == ROOT / "data" / "formats" / "bin.py" and "find_class" in methods, path
            if isinstance(node, ast.ImportFrom):
                assert node.module != "pickle", (
                    f"{path}: write `import pickle`, so that this test sees its calls"
                )
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


def torch_names(path: Path) -> dict[str, str]:
    """Return what a module calls parts of torch, such as nn or F, with the full names."""
    names = {}
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname or alias.name: f"{origin}{alias.name}" for alias in node.names}
    return {own: full for own, full in names.items() if full.startswith("torch.")}


def test_only_torch_private_uses_private_torch_apis():
    for path in MODULES:
        if path == ROOT / "torch_private.py":
            continue
        names = torch_names(path)
        used = (ast.unparse(node).split(".", 1) for node in nodes(path) if isinstance(node, ast.Attribute))
        for name in imported(path) | {f"{names.get(first, first)}.{rest}" for first, rest in used}:
            if not re.fullmatch(r"torch[\w.]*", name):
                continue
            # Dunder names, such as torch.__version__, are public.
            private = [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]
            assert not private, f"{path}: {name} is private; see facetrain/torch_private.py"


def declared_packages() -> set[str]:
    project = tomllib.loads((DOCS / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in lines} - {"facetrain"}


def test_the_project_declares_what_it_imports_and_imports_what_it_declares():
    """Without this, a package that another one happens to install is missing the day that this one drops it."""
    installs = importlib.metadata.packages_distributions()
    modules = {name.split(".")[0] for path in MODULES for name in imported(path)} - sys.stdlib_module_names
    packages = {installs.get(name, [name])[0].lower().replace("_", "-") for name in modules - {"facetrain"}}
    # These come with torch, pydantic, fsspec's http and jinja2.
    assert packages - {"triton", "pydantic-core", "aiohttp", "markupsafe"} <= declared_packages()
    # Imported by their names: by fsspec, by torch, and for `timm/NAME`.
    assert declared_packages() - packages <= {"gcsfs", "onnxscript", "s3fs", "tensorboard", "timm"}


def test_the_settings_of_all_parts_are_read_without_torch():
    script = "import sys, facetrain.config.loading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    settings = [path for path in MODULES if path.name == "settings.py"]
    sections = {ast.unparse(node) for node in nodes(ROOT / "config/schema.py")}
    for path in settings:
        module = "facetrain." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert any(text.startswith(f"from {module} import") for text in sections), f"no section: {path}"


def test_reading_and_changing_datasets_takes_no_torch():
    tools = [f"facetrain.data.tools.{path.stem}" for path in (ROOT / "data" / "tools").glob("[!_]*.py")]
    loaded = "facetrain.data.loading.reader", "facetrain.data.synthetic.dataset_writer", *sorted(tools)
    script = f"import sys, {', '.join(loaded)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(
    ("part", "unknown"),
    [
        ("sets", ("metrics", "output")),
        ("metrics", ("sets", "output")),
    ],
)
def test_sets_metrics_and_output_of_verify_are_apart(part, unknown):
    """`sets` reads files, `metrics` computes, `output` shows; the modules above them connect the three."""
    above = {path.stem for path in (ROOT / "verify").glob("*.py")} - {"__init__"}
    for path in (ROOT / "verify" / part).glob("*.py"):
        parts = {name.split(".")[2] for name in imported(path) if name.startswith("facetrain.verify.")}
        assert not parts & {*unknown, *above}, path


def test_the_output_of_verify_knows_results_and_no_evaluation():
    for path in (ROOT / "verify" / "output").glob("*.py"):
        assert "facetrain.verify.evaluate" not in imported(path), path


def test_the_run_folder_knows_nothing_of_the_parts_of_a_run():
    for path in (ROOT / "run" / "folder").glob("*.py"):
        assert not any(name.startswith("facetrain.run.parts") for name in imported(path)), path


def test_no_test_module_imports_another_one():
    """What several modules need is in tests/support, or a fixture of conftest.py."""
    for path in sorted((DOCS / "tests").rglob("*.py")):
        found = [name for name in imported(path) if re.search(r"^tests\.(\w+\.)*test_", name)]
        assert not found, (path, found)
