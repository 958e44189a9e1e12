import re
from types import SimpleNamespace

import pytest

from facetrain.models.model_card import escape_markdown, model_card

HOSTILE = "ann\x1b[2J\nforged: line\u202e<script>alert(1)</script>|`*x* [a](b) _c_"


def model_of(datasets, *, config=None, text="r50"):
    return SimpleNamespace(
        metadata={"config": config or {"data": {"train": "mix.yaml"}}, "datasets": datasets},
        preprocessing={"channels": text, "mean": 127.5, "scale": 127.5},
        image_size=112,
        embedding_size=512,
        description=text,
    )


def card_of(datasets):
    return model_card(model_of(datasets), "net", results={}, file={})


def test_the_model_card_lists_origin_and_license_of_all_datasets():
    text = card_of([{"name": "HSFace10k", "license": "CC BY-NC 4.0"}, {"name": "ours", "license": "unknown"}])
    assert "- HSFace10k" in text and "license: CC BY-NC 4.0" in text
    assert "- ours" in text and "license: _to be filled in" in text


def test_a_card_names_the_teacher_and_the_models_of_an_average():
    model = model_of([], config={"distill": {"teacher": "/home/ann/big", "margin_weight": 0}})
    model.metadata["average_of"] = [
        {"model": "/home/ann/a.pt", "weight": 1 / 3},
        {"model": "../acme/one/model.safetensors", "weight": 2 / 3},
    ]
    text = model_card(model, "net", results={}, file={})
    assert "- `distill.teacher`: big\n- `distill.margin_weight`: 0\n" in text
    assert (
        "Average of a.pt (weight 0.333), one (weight 0.667). The settings are those of the first one.\n"
        in text
    )


def test_without_dataset_cards_the_publisher_states_origin_and_terms():
    assert "Origin and terms of the data, and consent of the people: _to be filled in" in card_of([])


def test_names_in_a_card_are_neither_markup_nor_control_characters():
    config = {"data": {"train": HOSTILE, HOSTILE: 1}}
    model = model_of([{"name": HOSTILE, "license": HOSTILE}], config=config, text=HOSTILE)
    results = {
        HOSTILE: {
            "accuracy": 0.5,
            "intervals": {},
            "needs": {HOSTILE: "needs pairs"},
            "remarks": {HOSTILE: "uncertain"},
            "groups": [
                {"column": HOSTILE, "value": HOSTILE, "pairs": 9, "fmr": 0.1, "fnmr": 0.1, "intervals": {}}
            ],
        }
    }
    text = model_card(model, HOSTILE, results=results, file={})
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e]|^forged", text, re.MULTILINE)
    assert text.count("forged") >= 11
    row = next(line for line in text.splitlines() if line.startswith("| ann"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 5
    outside_code = re.sub(r"- `data[^`]*`", "", text)
    assert not re.search(r"(?<!\\)(`|\[a|\*x|<)", outside_code)


def test_a_card_states_on_how_much_its_results_rest():
    rates = {"tar@1e-02": 0.9, "fnmr@1e-02": 0.1, "tar@1e-03": None, "fnmr@1e-03": None}
    rests, lacks = "uncertain: rests on 8 false accepts, fewer than 30", "needs 1,000 impostor pairs"
    group = {"pairs": 1200.0, "fmr": 2e-7, "fnmr": None, "intervals": {"fmr": (0.0, 3e-6)}}
    found = {
        "pairs": 6000.0, "genuine": 3000.0, "probes": None, "subjects": 4281, "auc": 0.987654, **rates,
        "intervals": {"auc": (0.9, 0.99)},
        "needs": {"tar@1e-03": lacks, "fnmr@1e-03": lacks},
        "remarks": {"tar@1e-02": rests, "fnmr@1e-02": rests},
        "groups": [{"column": "sex", "value": "f", **group}],
    }  # fmt: skip
    lines = model_card(model_of([]), "net", results={"lfw": found}, file={}).splitlines()
    for line in (
        "- lfw: 6,000 pairs, 3,000 genuine, 4,281 subjects",
        "- lfw, sex = f: 1,200 pairs, fmr 2.0e-07 (0.00% to 3.0e-06), fnmr –",
        f"- lfw, tar@1e-02: {rests}.",
        "Each embedding is the sum of those of an image and its mirror image, except for accuracy_no_flip. The "
        "intervals are 95 % bootstrap intervals over subjects.",
        f"- lfw is too small for tar@1e-03: it {lacks}.",
    ):
        assert line in lines
    rows = [line for line in lines if line.startswith("| lfw")]
    assert rows == ["| lfw | auc | 0.98765 | 0.90000 to 0.99000 |", "| lfw | tar@1e-02 | 90.00% | – |"]
    assert not any("sex, age" in line for line in lines), "it was measured"
    assert not any("fnmr@" in line for line in lines)


def test_a_card_has_the_settings_that_are_not_empty_and_what_the_publisher_says():
    own = [{"type": "/home/ann/own.py:Blur", "options": {"masks": ["/home/ann/a.png", "b/c.png"], "p": 0.5}}]
    data = {"train": "x", "shards": 0, "cache": False, "filter": None, "names": [], "note": "", "own": own}
    start = {"init_from": "/home/ann/runs/first"}
    config = {"data": data, "model": start, "head": {"margin": {"m2": 0.5}}, "run": {"dir": "runs"}}
    model = model_of([], config=config)
    lines = model_card(model, "net", results={}, file={"format": "ONNX"}, license="MIT").splitlines()
    settings = [line for line in lines if line.startswith("- `")]
    assert settings == [
        "- `data.train`: x",
        "- `data.shards`: 0",
        "- `data.cache`: False",
        "- `data.own`: \\[{'type': 'own.py:Blur', 'options': {'masks': \\['a.png', 'b/c.png'\\], 'p': 0.5}}\\]",
        "- `model.init_from`: first",  # the folders are those of a machine
        "- `head.margin.m2`: 0.5",
    ]
    assert "- format: ONNX" in lines and "- license: MIT" in lines
    assert any(line.startswith("- intended use: _to be filled in") for line in lines)
    assert any(line.startswith("- license and intended use: _to be") for line in card_of([]).splitlines())


@pytest.mark.parametrize("datasets", [None, "text", ["text"]])
def test_metadata_of_another_form_has_no_settings_and_no_datasets(datasets):
    text = model_card(model_of(datasets, config="text"), "net", results={}, file={})
    assert "does not contain the settings of the training" in text and "## Data" not in text
    assert "Origin and terms of the data, and consent of the people: _to be filled in" in text


def test_ordinary_names_are_shown_as_they_are():
    for name in ("data/some_faces", "r50, 43,590,976 parameters", "tar@1e-06", "CC BY-NC 4.0", "Zoë (2026)"):
        assert escape_markdown(name) == name
