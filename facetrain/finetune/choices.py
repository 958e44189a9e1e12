"""Choices of a fine-tuning by the photos, the model and the machine, each with its reason, and the config they make."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from facetrain.config.loading import (
    build_config,
    is_within,
    override_keys,
    override_values,
    values_of_overrides,
)
from facetrain.config.schema import Config
from facetrain.strict_yaml import dump_yaml

_FEW_IMAGES = 20_000
"""Training images below which a fine-tuning takes small batches."""
_STEPS, _LEAST_EPOCHS = 128, 2
"""Steps that a fine-tuning on few images takes, and the least number of its epochs, see docs/log/log.md."""

_EITHER = {"train.global_batch_size": "train.batch_size"}
"""Key that is chosen, and the key that a config may have in its place, but not beside it."""


@dataclass(frozen=True)
class Facts:
    """Facts that the choices rest on."""

    model: str
    """Path of the model to start from."""
    backbone: Mapping[str, Any]
    """Arguments of `build_backbone` for its network."""
    train: str
    """Path of the training images, a dataset."""
    people: int
    images: int
    """Numbers of the training images and of the people on them."""
    held_out: str
    """Path of the verification set of held-out images."""
    teacher_cache: str
    """Path of the model's embeddings of the training images."""
    has_gpu: bool
    """Whether the fine-tuning runs on a GPU."""


class Choice(NamedTuple):
    """Values of config keys, and the reason for them."""

    values: dict[str, Any]
    """Value by dotted key."""
    reason: str

    @property
    def settings(self) -> str:
        """Keys and values as text."""
        return ", ".join(f"{key}: {json.dumps(value)}" for key, value in self.values.items())


def choose(facts: Facts, overrides: Iterable[str] = ()) -> list[Choice]:
    """Return the choices for a fine-tuning, in the order of the sections of a config.

    Those that the overrides (KEY=VALUE) replace are left out.

    Raises:
        ConfigError: an override has another form.
    """
    chosen = [*_model(facts), *_data(facts), *_head(facts), *_optimizer(facts), *_machine(facts)]
    return list(_without_given(chosen, override_keys(overrides)))


def _without_given(choices: Iterable[Choice], given_keys: Collection[str]) -> Iterator[Choice]:
    """Yield the choices without the keys that the user gives; what remains of one has lost its reason."""

    def given_for(key: str) -> str | None:
        # A key around one that the user gives stays: the config merges the two.
        others = (key, _EITHER.get(key, key))
        return next((other for other in others for each in given_keys if is_within(other, each)), None)

    for choice in choices:
        given = {key: name for key in choice.values if (name := given_for(key))}
        rest = {key: value for key, value in choice.values.items() if key not in given}
        if rest:
            yield Choice(rest, f"as without --set {', '.join(given.values())}") if given else choice


def _model(facts: Facts) -> Iterator[Choice]:
    options = dict(facts.backbone)
    name, image_size = options.pop("name"), options.pop("image_size")
    options.pop("dropout", None)
    own = options.pop("own", {})  # `model.options` in a description
    network = {f"model.{key}": value for key, value in options.items()}
    network |= {f"model.options.{key}": value for key, value in own.items()}
    yield Choice(
        {"model.backbone": name, **network, "data.image_size": image_size, "model.init_from": facts.model},
        "the network and the weights of the model",
    )
    yield Choice(
        {"model.train_batch_norm": False},
        f"{facts.images:,} images: the statistics of the model are better than those of so few",
    )


def _data(facts: Facts) -> Iterator[Choice]:
    yield Choice(
        {"data.train": facts.train},
        f"{facts.images:,} aligned images of {facts.people:,} people; other images of them are held out",
    )
    yield Choice(
        {"data.augment.flip": 0.5, "data.augment.color": 0.2, "data.augment.crop": 0.2},
        "mild changes of color and place, which take no detail from small faces; without them the model forgets more "
        "of other people",
    )


def _head(facts: Facts) -> Iterator[Choice]:
    yield Choice(
        {
            "distill.teacher": facts.model,
            "distill.cache": facts.teacher_cache,
            "distill.loss": "fixed_centers",
            "distill.margin_weight": 0,
        },
        "the margin loss with the model's mean embedding of each person as class center: few images cannot teach new "
        "centers, and random ones pull all embeddings away from the model's",
    )


def _optimizer(facts: Facts) -> Iterator[Choice]:
    batch = min(32 if facts.images < _FEW_IMAGES else 128, facts.images)
    steps_per_epoch = facts.images // batch  # a rest that fills no batch is left out of the epoch
    epochs = max(round(_STEPS / steps_per_epoch), _LEAST_EPOCHS)
    yield Choice(
        {"train.global_batch_size": batch, "train.epochs": epochs},
        f"{epochs * steps_per_epoch:,} steps: many more learn {facts.images:,} images by heart",
    )
    yield Choice(
        {
            "optim.lr": 1e-3,
            "optim.schedule": "cosine",
            "optim.warmup_epochs": 0.5,
            "optim.clip_grad_norm": 50,
        },
        "far below the usual 0.1, to keep what the model knows",
    )


def _machine(facts: Facts) -> Iterator[Choice]:
    if not facts.has_gpu:
        yield Choice({"train.precision": "fp32"}, "with which fine-tuning on a CPU was measured")
    yield Choice(
        {"eval.targets": [facts.held_out], "eval.every_steps": _STEPS // 4},
        "the held-out images give the curve",
    )


def config_text(
    choices: Iterable[Choice], overrides: Iterable[str], name: str, folder: str
) -> tuple[str, Config]:
    """Return the config of a run in `folder`/`name` as YAML, with the reasons as comments, and the config.

    The overrides (KEY=VALUE) win over the choices.

    Raises:
        ConfigError: a choice is no valid value.
    """
    values: dict[str, Any] = {"run": {"name": name, "dir": folder}, "log": {"tensorboard": False}}
    comments = []
    for choice in choices:
        override_values(values, choice.values)
        comments.append(f"# {', '.join(choice.values)}: {choice.reason}")
    override_values(values, values_of_overrides(overrides))
    config = build_config(values, "facetrain finetune")
    return "\n".join([*comments, dump_yaml(values)]), config
