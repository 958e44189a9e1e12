"""Parts of one's own, which a config names by their code: training, resume, and who may run them."""

import asyncio
import importlib
import json
import sys

import pytest
import torch

from facetrain import own_parts
from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.load import Checkpoint
from facetrain.cli.app import _exit_with_error, end_with
from facetrain.counter_rng import uniform
from facetrain.errors import ConfigError
from facetrain.head.build import build_margin
from facetrain.head.settings import MarginSettings
from facetrain.models.embedding_model import open_model
from facetrain.models.initialize_from import initialize_backbone
from facetrain.settings import OwnPart
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.telemetry.sink import LoggedRun, Sinks
from tests.support.command import facetrain
from tests.support.models import write_model
from tests.support.runs import checked

SOURCE = """
import json
import os
import signal
from pathlib import Path

import torch

from facetrain.counter_rng import uniform

Path("imported").touch()


def margin(cos, *, m):
    return torch.cos(torch.arccos(cos) + m)


def brighter(image, key, *, by):
    return image + by * uniform(key, 0).float().view(-1, 1, 1, 1)


def cut_on_rank_1(image, key):
    return image[:, :, 1:] if torch.distributed.get_rank() else image


class Net(torch.nn.Module):
    def __init__(self, embedding_size, image_size, width=4, drop=0.0):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, width, 3, 2)
        self.drop = torch.nn.Dropout(drop)
        self.fc = torch.nn.Linear(width, embedding_size)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, image):
        return self.fc(self.drop(self.conv(image).mean((2, 3))))


class Lines:
    def __init__(self, run, name="lines.txt"):
        self.folder, self.file = run.folder, open(run.folder / name, "a")

    def write(self, step, values):
        print(json.dumps([step, values]), file=self.file)

    def close(self):
        print("closed", *(path.name for path in self.folder.glob("*.safetensors")), file=self.file)
        self.file.close()


class Interrupted(Lines):
    def close(self):
        os.kill(os.getpid(), signal.SIGTERM)  # as the agent does when a rank is lost
        super().close()
"""
OWN = [
    "head={margin: {type: own_faces.parts:margin, options: {m: 0.3}, scale: 16}}",
    "model={backbone: own_faces.parts:Net, options: {width: 6}, layers: null, widths: null}",
    "data.augment={own: [{type: own_faces.parts:brighter, probability: 0.5, options: {by: 0.3}}]}",
    "log.sinks=[own_faces.parts:Lines, {type: own_faces.parts:Lines, options: {name: more.txt}}]",
]


def options(changes):
    return [word for change in changes for word in ("--set", change)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Folder in which the user has written parts, and starts facetrain."""
    # Otherwise the parts of an earlier test count as imported.
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_faces", "own_faces.parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own_faces").mkdir()
    (tmp_path / "own_faces" / "parts.py").write_text(SOURCE)
    return tmp_path


def refused(done, *names):
    """Check that a command has imported nothing, and says in one line what it did not import."""
    text = checked(done, 2).stderr
    assert "own_faces.parts:" in text and "--allow-code" in text and text.count("\n") == 1, text
    assert all(name in text for name in names), text


@pytest.mark.slow
def test_a_short_run_whose_margin_is_never_finite_has_trained_nothing_and_fails(describe, home):
    margin = "head={margin: {type: own_faces.parts:margin, options: {m: .nan}, scale: 16}}"
    sink = "log.sinks=[own_faces.parts:Interrupted]"
    train = ["train", "--config", describe(steps=3), *options([margin, sink]), "--run-dir", "run"]
    assert "not finite in 3 consecutive steps" in checked(facetrain(*train, cwd=home), 1).stderr
    assert (home / "run" / "lines.txt").read_text().endswith("closed\n"), "SIGTERM leaves time for it"
    assert not (home / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_own_parts_train_resume_bit_for_bit_and_run_for_others_only_if_they_are_allowed(describe, home):
    train = ["train", "--config", describe(steps=6), *options([*OWN, "model.options.drop=0.3"])]
    checked(facetrain(*train, "--run-dir", home / "run", cwd=home))
    expected = (home / "run" / "model.safetensors").read_bytes()
    lines = (home / "run" / "lines.txt").read_text().splitlines()
    assert lines[-1] == "closed model.safetensors", "a sink may wait without end"
    step, values = json.loads(lines[0])
    assert values.items() <= read_jsonl(home / "run" / "metrics.jsonl")[0].items() and step == 0
    assert (home / "run" / "more.txt").exists()
    parts = ("model.backbone", "head.margin.type", "data.augment.own[0].type", "log.sinks[0]", "log.sinks[1]")
    assert {f"code {part}" for part in parts} <= Checkpoint.open(home / "run").meta.keys()
    done = facetrain(
        "train", "--config", describe(steps=2), *options(OWN), "--run-dir", home / "short", cwd=home
    )
    checked(done)
    suggested = [line for line in done.stdout.splitlines() if line.startswith("  facetrain ")]
    assert len(suggested) > 1 and all(line.endswith(" --allow-code") for line in suggested)
    (home / "imported").unlink()
    for command in (
        ("resume", home / "run"),
        ("export", home / "run", "--format", "onnx", "--output", home / "m.onnx"),
    ):
        refused(facetrain(*command, cwd=home))
    refused(facetrain("eval", home / "run", "--target", "val", cwd=home), "model.safetensors")
    assert not (home / "imported").exists()
    checked(facetrain("resume", home / "run", "--checkpoint", 4, "--allow-code", cwd=home))
    assert (home / "run" / "model.safetensors").read_bytes() == expected
    checked(facetrain("--allow-code", "eval", home / "run", "--target", "val", cwd=home))
    export = ["export", home / "run", "--opset", 17, "--output", home / "m.onnx"]  # by the faster exporter
    checked(facetrain(*export, "--allow-code", cwd=home))
    # A changed source is another run, and perhaps another network.
    (home / "own_faces" / "parts.py").write_text(SOURCE.replace("+ m)", "+ 2 * m)"))
    evaluate = ["eval", home / "run", "--target", "val", "--allow-code", "--bootstrap", 0]
    assert (
        "another version of the file that defines own_faces.parts:Net"
        in checked(facetrain(*evaluate, cwd=home)).stderr
    )
    resume = ["resume", home / "run", "--checkpoint", 4, "--allow-code"]
    error = checked(facetrain(*resume, cwd=home), 2).stderr
    assert "error: model.backbone, head.margin.type, data.augment.own, log.sinks: " in error
    assert error.endswith("--set data.augment.own=VALUE --set log.sinks=VALUE\n"), "one way to allow all"


@pytest.mark.slow
def test_own_parts_give_the_same_losses_on_two_ranks(describe, home):
    train = ["train", "--config", describe(steps=4), *options(OWN), "--run-dir"]
    checked(facetrain(*train, home / "one", cwd=home))
    checked(facetrain(*train, home / "two", "--nproc-per-node", 2, cwd=home))
    losses = [
        [record["loss"] for record in read_jsonl(home / name / "metrics.jsonl") if "loss" in record]
        for name in ("one", "two")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_an_unused_parameter_on_two_ranks_with_two_micro_batches_is_refused_until_it_is_frozen(
    describe, home
):
    changes = [*OWN, "optim.accumulate=2"]
    train = ["train", "--config", describe(steps=2), "--nproc-per-node", 2, *options(changes), "--run-dir"]
    message = "error: model.backbone: the network does not use network.unused.weight, network.unused.bias; "
    assert checked(facetrain(*train, home / "run", cwd=home), 2).stderr.count(message) == 1
    checked(facetrain(*train, home / "frozen", "--set", "model.freeze=[network.unused]", cwd=home))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--lr", "find"]], ids=["training", "range test"])
def test_a_wrong_augmentation_ends_all_ranks_though_only_one_of_them_has_drawn_an_image(
    describe, home, options
):
    own = "data.augment={own: [{type: own_faces.parts:cut_on_rank_1, probability: 1}]}"
    train = ["train", "--config", describe(steps=20), "--nproc-per-node", 2, "--set", own, *options]
    done = facetrain(*train, "--run-dir", home / "run", "--set", "train.timeout_s=60", cwd=home)
    assert "own_faces.parts:cut_on_rank_1 maps a tensor" in checked(done, 2).stderr


@pytest.mark.slow
def test_a_run_that_cannot_begin_leaves_no_folder_and_no_open_sink(describe, home):
    (home / "run").mkdir()
    wrong = "data.augment={own: [{type: own_faces.parts:brighter, options: {b: 0.3}}]}"
    train = ["train", "--config", describe(steps=2), "--run-dir", home / "run", *options([OWN[-1], wrong])]
    assert "data.augment.own[0]" in checked(facetrain(*train, cwd=home), 2).stderr
    assert not {"config.yaml", "state.json", "lines.txt"} & {path.name for path in (home / "run").iterdir()}
    for name in ("log.txt", "metrics.jsonl", "lr_range_test.json"):
        (home / "run" / name).mkdir()
        assert f"/{name}: " in checked(facetrain(*train[:-2], cwd=home), 1).stderr
        assert (home / "run" / "lines.txt").read_text() == "closed\n"
        (home / "run" / name).rmdir()
        (home / "run" / "lines.txt").unlink()


def test_only_the_places_that_were_allowed_are_imported(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr(own_parts, "_allowed", set())
    own_parts.allow(
        ["own_faces.parts:margin", "own_faces.missing:x", "own_faces.parts:SOURCE", "json:nothing"]
    )
    with pytest.raises(ConfigError, match="key: .*own_faces.parts:brighter.*--allow-code"):
        own_parts.load_part("own_faces.parts:brighter", "key")
    assert not (home / "imported").exists()
    assert own_parts.load_part("own_faces.parts:margin", "key").__name__ == "margin"
    for place in ("own_faces.missing:x", "own_faces.parts:SOURCE", "json:nothing"):
        with pytest.raises(ConfigError, match=f"^key: {place}"):
            own_parts.load_part(place, "key")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import mlflow_that_is_missing\n", ("/broken_part.py:1: ModuleNotFoundError: ",)),
        ("\nm = 1 / 0\n", ("/broken_part.py:2: ZeroDivisionError: ",)),
        ("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n", ("/broken_part.py:2: SystemExit: 2",)),
        ("f = =\n", ("SyntaxError: ", "(broken_part.py, line 1)")),
        ("g = f = 3\n", ("/broken_part.py has no such function or class",)),
        (None, ("ModuleNotFoundError: ", "start facetrain in the folder that has broken_part")),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_imported_is_refused_with_its_line_or_else_its_folder(
    tmp_path, monkeypatch, source, names
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_parts, "_allowed", {"broken_part:f"})
    if source is not None:
        (tmp_path / "broken_part.py").write_text(source)
    with pytest.raises(ConfigError, match=r"^key: broken_part:f[: ]") as refused:
        own_parts.load_part("broken_part:f", "key")
    sys.modules.pop("broken_part", None)
    assert all(name in str(refused.value) for name in names), refused.value
    assert ("start facetrain" in str(refused.value)) == (source is None), refused.value


def test_a_type_error_of_a_part_is_not_taken_for_wrong_options(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "part_with_a_bug.py").write_text(
        "import torch\n"
        "from facetrain.head.margins.base import Margin\n\n\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, embedding_size, image_size):\n"
        "        None + 1\n\n\n"
        "class Own(Margin):\n"
        "    def __init__(self, **options):\n"
        "        None + 1\n\n\n"
        "def sink(run):\n"
        "    None + 1\n"
    )
    own_parts.allow(f"part_with_a_bug:{name}" for name in ("Net", "Own", "sink"))
    for build, line in (
        (lambda: build_backbone("part_with_a_bug:Net", embedding_size=8, image_size=16), 7),
        (lambda: build_margin(MarginSettings(type="part_with_a_bug:Own")), 12),
    ):
        with pytest.raises(TypeError) as raised:
            build()
        assert own_parts.line_of(raised.value) == f"{tmp_path}/part_with_a_bug.py:{line}"
    # As any other error of a sink, it does not end the run.
    sinks = Sinks([OwnPart(type="part_with_a_bug:sink")], LoggedRun(tmp_path, "run", "id", {}))
    place = f"{tmp_path}/part_with_a_bug.py:16: TypeError: "
    assert f"part_with_a_bug:sink cannot be opened ({place}" in sinks.faults[0]


def test_a_file_that_has_changed_since_its_import_is_refused_until_it_is_loaded_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would take it for an edit within a second
    places = ["edited_margin:f", "names_edited_margin:f"]
    monkeypatch.setattr(own_parts, "_allowed", set(places))
    (tmp_path / "edited_margin.py").write_text("def f(cos): return cos - 0.2\n")
    (tmp_path / "names_edited_margin.py").write_text("from edited_margin import f\n")
    for place in places:
        own_parts.require_unchanged(place, "key")
    [before] = {own_parts.source_digest(place) for place in places}
    (tmp_path / "edited_margin.py").write_text("def f(cos): return cos - 0.3\n")
    for place in places:
        message = r"^key: .*/edited_margin\.py has changed since it was imported; .*reload\(edited_margin\)"
        with pytest.raises(ConfigError, match=message):
            own_parts.require_unchanged(place, "key")
        assert own_parts.source_digest(place) == before, "of the code that runs"
    importlib.reload(sys.modules["edited_margin"])
    own_parts.require_unchanged(places[0], "key")
    assert own_parts.source_digest(places[0]) != before


@pytest.mark.parametrize(
    "part", ["torch.Tensor.clamp", "torch.relu", "math.exp", "functools.partial(F)", "F()", "F().__call__"]
)
def test_every_callable_of_a_module_has_a_digest(tmp_path, monkeypatch, part):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_parts, "_allowed", {"callable_part:f"})
    monkeypatch.delitem(sys.modules, "callable_part", raising=False)
    (tmp_path / "callable_part.py").write_text(
        f"import functools, math, torch\nclass F:\n    def __call__(self, x): return x\nf = {part}\n"
    )
    own_parts.require_unchanged("callable_part:f", "key")
    assert own_parts.source_digest("callable_part:f")


@pytest.mark.parametrize(("trained", "warned"), [("the same", False), ("0" * 64, True), ("", False)])
def test_weights_of_another_version_of_a_network_give_a_warning(
    tmp_path, monkeypatch, capsys, trained, warned
):
    monkeypatch.syspath_prepend(tmp_path)
    place = "trained_net:Net"
    monkeypatch.setattr(own_parts, "_allowed", {place})
    (tmp_path / "trained_net.py").write_text(
        "import torch\n\n\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, embedding_size, image_size):\n"
        "        super().__init__(image_size, embedding_size)\n"
    )
    options = {"embedding_size": 8, "image_size": 16}
    network = build_backbone(place, **options)
    code = own_parts.source_digest(place) if trained == "the same" else trained
    path = tmp_path / "model.safetensors"
    write_model(path, place, options, network=network, **({"code": code} if code else {}))
    for use in (
        lambda: open_model(path, torch.device("cpu")),
        lambda: initialize_backbone(network, path, None),
    ):
        use()
        assert (f"warning: {path}: was trained with another version" in capsys.readouterr().err) == warned


def test_a_part_in_the_main_program_is_refused(monkeypatch):
    monkeypatch.setattr(own_parts, "_allowed", {"__main__:main"})
    with pytest.raises(ConfigError, match="^key: __main__:main: .*my_faces"):
        own_parts.load_part("__main__:main", "key")


def test_an_error_in_a_part_names_its_file_and_line(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setattr(own_parts, "_allowed", {"own_faces.parts:brighter"})
    brighter = own_parts.load_part("own_faces.parts:brighter", "key")
    with pytest.raises(TypeError) as own:
        brighter(torch.zeros(1), None, by=1)
    with pytest.raises(TypeError) as other:
        uniform(None, 0)
    code = brighter.__code__
    for error, place in ((own, f"{code.co_filename}:{code.co_firstlineno + 1}"), (other, "internal error")):
        with pytest.raises(SystemExit, match="1"):
            _exit_with_error(error.value)
        assert f"error: {place}: TypeError: " in capsys.readouterr().err


def ends_with_0():
    sys.exit(0)


def ends_with_143():
    raise SystemExit(143)


def is_cancelled():
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("part", "code", "message"),
    [
        (ends_with_0, 1, "SystemExit: 0"),
        (ends_with_143, 143, None),
        (is_cancelled, 1, "CancelledError: CancelledError"),
    ],
)
def test_a_part_ends_no_command_without_a_word_unless_a_signal_came(part, code, message, monkeypatch, capsys):
    monkeypatch.setitem(own_parts._imports, __name__, (None, ""))
    with pytest.raises(SystemExit) as ended:
        end_with(part, debug=False)
    place = f"{part.__code__.co_filename}:{part.__code__.co_firstlineno + 1}"
    expected = f"error: {place}: {message}; run again with --debug for the traceback\n" if message else ""
    assert (ended.value.code, capsys.readouterr().err) == (code, expected)


@pytest.mark.parametrize(
    "place", ["os", "a:b:c", "a b:c", ":x", "x:", "/tmp/a.py:f", "a.:b", "s3://a", "C:\\x"]
)
def test_other_text_is_no_place(place):
    assert not own_parts.is_place(place)
