"""A model card: what a network is, what it was trained on, how good it is, and where that ends.

After Mitchell et al., "Model Cards for Model Reporting" (FAT* 2019), as far as the files tell; what only
people know is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from facetrain.models.model_file import EmbeddingModel

_ASKED = "_to be filled in by whoever publishes the model_"
_SHARES = ("accuracy", "eer", "tar@", "rank", "tpir@")


def model_card(model: EmbeddingModel, name: str, *, results: Mapping[str, Any]) -> str:
    """Return the card as Markdown; `results` are the sets of an evaluation by name, as its JSON has them."""
    config = model.notes.get("config")
    parts = [
        f"# {name}\n",
        *_network(model),
        *_training(config if isinstance(config, Mapping) else {}),
        *_results(results),
        *_limits(results),
    ]
    return "\n".join(parts) + "\n"


def _network(model: EmbeddingModel) -> Iterator[str]:
    given = model.preprocessing
    size = model.image_size
    yield f"Maps a face to {model.embedding_size} numbers; faces of one person point in one direction.\n"
    yield f"- network: {model.description}"
    yield f"- input: {size} × {size} pixels, {given['channels']}, aligned by five landmarks as ArcFace's images are"
    yield f"- normalization: (x − {given['mean']}) / {given['scale']} of pixels from 0 to 255"
    yield "- comparison: cosine similarity"
    yield f"- license and intended use: {_ASKED}\n"


def _training(config: Mapping[str, Any]) -> Iterator[str]:
    yield "## Training\n"
    if not config:
        yield f"The file does not say how it was trained. Data, and the consent of those in it: {_ASKED}\n"
        return
    for section in ("data", "model", "head", "optim", "train"):
        for key, value in _flat(config.get(section, {}), section):
            yield f"- `{key}`: {value}"
    yield f"\nOrigin and terms of the data, and the consent of those in it: {_ASKED}\n"


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings that say something: by their full names, without what is empty."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}")
    elif values not in (None, [], (), ""):
        yield prefix, values


def _results(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Results\n"
    if not results:
        yield "Not evaluated: `facetrain export --target` adds the numbers of verification sets.\n"
        return
    yield "Intervals are the middle 95 % over draws of subjects.\n"
    yield "| set | number | value | 95 % interval |"
    yield "|---|---|---|---|"
    for name, found in results.items():
        for metric, value in found.items():
            share = metric.startswith(_SHARES) and isinstance(value, float)
            if share or (metric == "auc" and value is not None):
                span = found["intervals"].get(metric)
                within = f"{_shown(metric, span[0])} to {_shown(metric, span[1])}" if span else "–"
                yield f"| {name} | {metric} | {_shown(metric, value)} | {within} |"
    yield ""
    for name, found in results.items():
        for group in found["groups"]:
            rates = ", ".join(f"{rate} {_shown(rate, group[rate])}" for rate in ("fmr", "fnmr"))
            yield f"- {name}, {group['column']} = {group['value']}: {rates}"


def _limits(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Limits\n"
    yield "- A threshold from one set does not hold for other cameras, poses and people: set it on your own pairs."
    yield "- Faces that are not aligned, or smaller than the input, give worse embeddings."
    for name, found in results.items():
        for metric, lack in found["needs"].items():
            yield f"- {name} cannot tell {metric}: it {lack}."
    if not any(found["groups"] for found in results.values()):
        yield "- Error rates by sex, age or skin tone were not measured (`facetrain eval --slices`); they may differ."
    yield "- Embeddings are biometric data: in many places storing or comparing them needs consent."


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.5f}" if metric == "auc" else f"{value:.3%}"
