"""Conversion of arcface_torch's config files, which are Python code: they are parsed, never executed."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from facetrain.config.loading import build_config
from facetrain.config.python_values import PythonValues
from facetrain.config.schema import NAME_PATTERN
from facetrain.errors import ConfigError
from facetrain.files import error_reason
from facetrain.strict_yaml import dump_yaml
from facetrain.text import printable

DEFAULTS: dict[str, Any] = {
    "margin_list": (1.0, 0.5, 0.0),
    "network": "r50",
    "embedding_size": 512,
    "sample_rate": 1,
    "interclass_filtering_threshold": 0,
    "fp16": False,
    "batch_size": 128,
    "optimizer": "sgd",
    "lr": 0.1,
    "weight_decay": 5e-4,
    "verbose": 2000,
    "frequent": 10,
    "gradient_acc": 1,
    "seed": 2048,
    "num_epoch": 20,
    "warmup_epoch": 0,
    "val_targets": [],
}
"""Values of arcface_torch's configs/base.py, for configs that come without that file."""

_NOT_NEEDED = {"resume", "save_all_states", "momentum", "num_workers", "dali"}
"""Settings that need no key: facetrain does the same, or arcface_torch ignores them."""
_TRANSLATED = DEFAULTS.keys() | {
    "rec",
    "output",
    "dali_aug",
    "using_wandb",
    "num_classes",
    "num_image",
    "decay_epoch",
}
_OWN_LOSSES = ("adaface", "curricularface", "magface")
"""Values of `config.loss` in forks, which are margins of facetrain. They keep the published numbers."""
_WANDB = {"wandb_project", "wandb_entity", "wandb_key", "wandb_resume", "wandb_log_all", "save_artifacts"}
"""Settings of W&B, which takes its own from the environment."""
_MARGINS_OF_LOSSES = {"arcface": (1.0, 0.5, 0.0), "cosface": (1.0, 0.0, 0.4)}
"""Values of `config.loss`, arcface_torch's setting of 2021, as a margin_list. The scale was 64 then too."""
_SIZES = {"num_classes": "num_classes", "num_image": "num_images"}
_LISTS = ("margin_list", "val_targets")
_RECOMPUTED = ("vit_b", "vit_l", "vit_h")
"""Networks whose activations arcface_torch computes again in the backward pass."""


def convert(path: Path) -> str:
    """Return a config of arcface_torch as YAML, with the recipe of arcface_torch's present code.

    Raises:
        ConfigError: the file does more than assign plain values to `config` (the message has all such lines), or a
            value has a type that arcface_torch does not accept.
    """
    # arcface_torch reads base.py first and lets the named file override it.
    base = path.parent / "base.py"
    has_base = base.exists() and path.name != "base.py"
    files = [PythonValues(file) for file in ([base] if has_base else []) + [path]]
    assigned = {name: value for file in files for name, value in file.values.items()}
    functions = {name: numbers for file in files for name, numbers in file.functions.items()}
    named = files[-1].values
    _require_lists(files[-1], path)
    loss = assigned.get("loss")
    # A file with `loss` is older than a base.py with `margin_list`, which would override it.
    has_older_loss = named.get("loss") is not None and "margin_list" in assigned.keys() - named.keys()
    if has_older_loss:
        del assigned["margin_list"]
    margin = _MARGINS_OF_LOSSES.get(str(loss))
    translated_loss = {"margin_list": margin} if margin else {}
    values = DEFAULTS | translated_loss | assigned
    has_margin = margin or loss in _OWN_LOSSES
    if loss is not None and not has_margin and "margin_list" not in assigned:
        raise ConfigError(f"{path}: config.loss {loss!r} is unknown; set config.margin_list to (m1, m2, m3)")
    if "rec" not in values:
        raise ConfigError(
            f'{path}: config.rec, the folder of the dataset, is missing; add the line config.rec = "FOLDER"'
        )
    try:
        described = _translate(values, path)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(
            f"{path}: a value has a type that arcface_torch does not accept ({error_reason(error)})"
        ) from error
    of_2021 = _is_of_2021(assigned.keys() | functions.keys())
    if of_2021 and described["head"]["margin"]["type"] == "arcface":
        described["head"]["margin"]["gradient"] = "exact"
    built = build_config(described, str(path))  # check the result
    notes = [note for file in files for note in file.notes]
    notes += [_note_on_function(name, numbers) for name, numbers in functions.items()]
    notes += _notes_on_values(values, assigned)
    if has_older_loss:
        notes.append(f"# margin_list: that of base.py is left out, because {path.name} has loss")
    if of_2021:
        share = built.optim.lr * (built.train.batch_size or DEFAULTS["batch_size"]) / 512
        notes.append(
            "# lr: the code of 2021 multiplied it by the images of a step / 512: set optim.lr to "
            f"{share:g} times the number of GPUs"
        )
    unknown = values.keys() - _TRANSLATED - _NOT_NEEDED - _WANDB - ({"loss"} if has_margin else set())
    # None, as base.py has it for one of them, is a setting that nobody has made.
    notes += [
        f"# {name}: is left out, because facetrain does not know it"
        for name in sorted(unknown)
        if values[name] is not None
    ]
    head = [f"# Converted from arcface_torch's {path.name}."]
    # At the end: these need no action, and they would hide the others.
    left_out = sorted(_NOT_NEEDED & values.keys())
    tail = [f"# Left out, because facetrain needs no key for it: {', '.join(left_out)}"] if left_out else []
    # A line break in a text of the file would end the comment, and begin a key.
    comments = [printable(line) for line in (*head, *notes)]
    return "\n".join([*comments, dump_yaml(described).rstrip("\n"), *tail, ""])


def _is_of_2021(settings: Collection[str]) -> bool:
    """Return whether the config with these settings is for the code of 2021, whose rate and margin gradient differ."""
    return "margin_list" not in settings and not {"decay_epoch", "lr_func"}.isdisjoint(settings)


def _note_on_function(name: str, numbers: str) -> str:
    # In lr_func, the list has the epochs after which the rate falls.
    with_list = f", with its list {numbers}" if numbers else ""
    advice = "for its learning rate set optim.schedule and optim.milestones"
    return f"# {name}: is code and is left out{with_list}; {advice}"


def _require_lists(file: PythonValues, path: Path) -> None:
    for name in _LISTS:
        if isinstance(value := file.values.get(name), str):
            raise ConfigError(
                f"{path}, line {file.lines[name]}: config.{name} is text, not a list; write [{value!r:.60}]"
            )


def _translate(values: dict[str, Any], path: Path) -> dict[str, Any]:
    # With the recipe of its present code, which is what reads these files.
    described: dict[str, Any] = {
        "recipe": "head",
        "seed": values["seed"],
        "run": _run(values, path),
        "data": {"train": values["rec"]},
        "model": {"backbone": _backbone(values["network"]), "embedding_size": values["embedding_size"]},
        "head": {
            "margin": {
                **_margin(values),
                # arcface_torch has no setting for it.
                "scale": 64.0,
                "filter_threshold": float(values["interclass_filtering_threshold"]),
            },
            "sample_rate": float(values["sample_rate"]),
        },
        "optim": {
            "name": values["optimizer"],
            "lr": values["lr"],
            "weight_decay": values["weight_decay"],
            "accumulate": values["gradient_acc"],
            # Configs of arcface_torch have −1 for no warm-up.
            "warmup_epochs": max(values["warmup_epoch"], 0),
        },
        "train": {
            "batch_size": values["batch_size"],
            "epochs": values["num_epoch"],
            "precision": "fp16" if values["fp16"] else "fp32",
        },
        "eval": {"targets": list(values["val_targets"]), "every_steps": _steps("verbose", values)},
        "log": {"every_steps": _steps("frequent", values)},
    }
    if described["model"]["backbone"] in _RECOMPUTED:
        described["model"]["checkpoint_activations"] = True
    if milestones := _milestones(values):  # a tenth of the rate at each
        described["optim"] |= {"schedule": "steps", "milestones": milestones}
    if values.get("using_wandb"):
        described["log"]["sinks"] = ["wandb"]
    described["data"] |= {
        ours: values[theirs] for theirs, ours in _SIZES.items() if isinstance(values.get(theirs), int)
    }
    if values.get("dali") and values.get("dali_aug"):
        described["data"]["augment"] = {"low_resolution": 0.1, "blur": 0.2, "color": 0.2, "gray": 0.1}
    return described


def _margin(values: dict[str, Any]) -> dict[str, Any]:
    """Return type and numbers of the margin, without those that it does not use: another type keeps its own."""
    if values.get("loss") in _OWN_LOSSES:
        return {"type": values["loss"]}
    m1, m2, m3 = (float(value) for value in values["margin_list"])
    # By the values: arcface_torch knows one class of margins, and facetrain names its common cases.
    if m3 > 0:
        return {"type": "cosface", "m3": m3}  # arcface_torch subtracts m3 alone then
    if m1 == 1 and m3 == 0:
        return {"type": "arcface", "m2": m2}
    return {"type": "combined", "m1": m1, "m2": m2, "m3": m3}


def _run(values: dict[str, Any], path: Path) -> dict[str, str]:
    """Return name and folder of the run: that of arcface_torch is the folder `output` itself.

    Without a usable name there, it has that of the file, with "-" for what no name of a run may have.
    """
    of_file = re.sub("[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    if not values.get("output"):
        return {"name": of_file}
    output = Path(str(values["output"]))
    if re.fullmatch(NAME_PATTERN, output.name):
        return {"name": output.name, "dir": str(output.parent)}
    return {"name": of_file, "dir": str(output)}


def _milestones(values: dict[str, Any]) -> list[float]:
    """Return the epochs of `decay_epoch`; empty if it is no list of rising epochs."""
    epochs = values.get("decay_epoch")
    if not isinstance(epochs, list | tuple) or not all(type(each) in (int, float) for each in epochs):
        return []
    return list(epochs) if all(low < high for low, high in pairwise([0, *epochs])) else []


def _steps(name: str, values: dict[str, Any]) -> Any:
    """Return an interval in steps: arcface_torch counts micro-batches. The schema refuses one that is no number."""
    interval, micro_batches = values[name], values["gradient_acc"]
    if type(interval) is not int or type(micro_batches) is not int or interval < 1 or micro_batches < 2:
        return interval
    return max(interval // micro_batches, 1)


def _backbone(network: str) -> str:
    # For example vit_t_dp005_mask0: facetrain's ViTs have the drop path of 0.05 too, but no masking of patches in
    # training. Its ratio is the number at the end: 0 or 0.05 in the published configs.
    return "_".join(network.split("_")[:2]) if network.startswith("vit_") else network


def _notes_on_values(values: dict[str, Any], assigned: dict[str, Any]) -> list[str]:
    """Return comment lines about values that the YAML text does not express, although their setting has a key."""
    notes = []
    if values.get("loss") in _OWN_LOSSES:
        if "margin_list" in assigned:
            notes.append(f"# margin_list: is left out, because loss is {values['loss']}")
    else:
        m1, m2, m3 = (float(value) for value in values["margin_list"])
        if m3 > 0 and (m1, m2) != (1, 0):
            notes.append(
                "# margin_list: m1 and m2 are left out, because arcface_torch ignores them where m3 is above 0"
            )
    if str(values.get("loss")) in _MARGINS_OF_LOSSES and "margin_list" in assigned:
        notes.append("# loss: is left out, because margin_list is set")
    if values.get("using_wandb") and (values.get("wandb_project") or values.get("wandb_entity")):
        places = {"WANDB_PROJECT": values.get("wandb_project"), "WANDB_ENTITY": values.get("wandb_entity")}
        given = " ".join(f"{name}={value}" for name, value in places.items() if value)
        notes.append(f"# using_wandb: start the run with {given} in the environment")
    if values.get("decay_epoch") and not _milestones(values):
        notes.append("# decay_epoch: is no list of rising epochs and is left out")
    elif values.get("decay_epoch") and "margin_list" in assigned:
        notes.append("# decay_epoch: is kept, although arcface_torch's code for margin_list ignores it")
    if values.get("momentum", 0.9) != 0.9:
        notes.append(
            "# momentum: is left out, because arcface_torch ignores it and uses 0.9; see optim.momentum"
        )
    if values.get("dali_aug") and not values.get("dali"):
        notes.append("# dali_aug: is left out, because it has no effect without dali")
    network = values["network"]
    if network.startswith("vit_") and not network.endswith(("_dp005_mask0", "_dp005_mask_0")):
        notes.append("# network: the drop path is 0.05, and no patches are masked in training")
    notes += [
        f"# {name}: is not an integer and is left out"
        for name in _SIZES
        if values.get(name) is not None and not isinstance(values[name], int)
    ]
    return notes
