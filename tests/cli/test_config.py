import json
import subprocess
import sys

import pytest
import yaml
from jsonschema import Draft202012Validator

from facetrain.config.schema import file_schema
from tests.support.command import ROOT, facetrain, output_of, refusal


def test_show_prints_every_key_after_recipe_and_set():
    path = ROOT / "configs" / "ms1mv3_r50.yaml"
    shown = yaml.safe_load(output_of("config", "show", path, "--set", "optim.lr=0.2"))
    assert shown["optim"]["lr"] == 0.2 and shown["optim"]["power"] == 2 and "async" in shown["checkpoint"]


def test_the_presets_are_listed_without_torch():
    script = "import sys; from facetrain.cli.config import list_; list_(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0


def test_list_shows_the_presets_with_dataset_backbone_batch_and_accuracy():
    done = facetrain("config", "list")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert rows["glint360k_r100"] == [
        "glint360k*",
        "r100",
        "8",
        "1,024",
        *["97.55", "%", "IJB-C", "TAR@1e-4"],
    ]
    assert rows["glint360k"] == rows["glint360k_r100"]
    assert (
        "glint360k: partly made from MS-Celeb-1M, which Microsoft withdrew in 2019; facetrain get"
        in done.stdout
    )
    assert rows["hsface10k_r50"] == [
        "hsface10k.lmdb",
        "r50",
        "1",
        "128",
        *["92.00", "%", "mean", "of", "five", "sets"],
    ]
    assert rows["dcface_r50"][0] == "dcface_0.5m_oversample_xid", "not `record`, a folder inside it"
    assert rows["quickstart"] == ["quickstart", "iresnet", "any", "64"]
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} < rows.keys()


def test_the_schema_describes_the_keys():
    settings = json.loads(output_of("config", "schema"))["$defs"]["HeadSettings"]["properties"]
    assert "Fraction of the classes" in settings["sample_rate"]["description"]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("extends: other.yaml\ndistill: {weight: 2}", []),
        ("optim: {lr: 0.2}", []),  # data.train by --set
        ("optim: {rate: 0.2}", ["Additional properties are not allowed ('rate' was unexpected)"]),
        ("train: {stages: [{batch_size: 8}]}", ["'until_epoch' is a required property"]),
    ],
)
def test_the_schema_accepts_files_that_are_part_of_a_config(text, faults):
    found = Draft202012Validator(file_schema()).iter_errors(yaml.safe_load(text))
    assert [fault.message for fault in found] == faults


def test_a_file_that_cannot_be_converted_gives_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "a.py").write_text("import os\nos.system('true')\n")
    done = facetrain("config", "convert", tmp_path / "a.py")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "line 2" in done.stderr
    # Also of PLSC and CVLface, whose keys are not facetrain's.
    assert "only Python files of arcface_torch are converted; if it is a config of facetrain, use it" in str(
        refusal("config", "convert", tmp_path / "a.yaml")
    )
