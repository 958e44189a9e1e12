import json

import yaml

from tests.support.command import ROOT, facetrain


def test_show_prints_every_key_after_recipe_and_set():
    done = facetrain("config", "show", ROOT / "configs" / "ms1mv3_r50.yaml", "--set", "optim.lr=0.2")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["optim"]["lr"] == 0.2 and shown["optim"]["power"] == 2 and "async" in shown["checkpoint"]


def test_the_schema_explains_the_keys():
    done = facetrain("config", "schema")
    schema = json.loads(done.stdout)
    assert "Share of the classes" in schema["$defs"]["HeadConfig"]["properties"]["sample_rate"]["description"]


def test_a_config_that_is_not_one_ends_with_2_and_one_line(tmp_path):
    (tmp_path / "a.py").write_text("import os\nos.system('true')\n")
    done = facetrain("config", "convert", tmp_path / "a.py")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "line 2" in done.stderr
