"""Model card: a Markdown page about a network, its training, its accuracy and its limits.

The sections follow Mitchell et al., "Model Cards for Model Reporting" (FAT* 2019), as far as the files
contain the answers. The other answers are left to the publisher.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.model_file import CARDS_KEY, CONFIG_KEY, MODEL_FILE, SOURCES_KEY
from facetrain.text import percent, printable

_TO_FILL_IN = "_to be filled in by the publisher of the model_"
_RATES = ("accuracy", "auc", "eer", "tar@", "rank", "tpir@")
"""Prefixes of the metrics that are shares from 0 to 1."""
_FOLLOWING = ("fnmr@", "fnir@")
"""Prefixes of the error rates that follow from TAR and TPIR."""
_SIZES = ("pairs", "genuine", "probes", "mated", "entries", "subjects")
_SMALLEST_PERCENT = 1e-5
"""A smaller rate has no digits in percent."""
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def model_card(
    model: EmbeddingModel,
    name: str,
    *,
    results: Mapping[str, Any],
    file: Mapping[str, str],
    license: str | None = None,
) -> str:
    """Return the card as Markdown.

    Args:
        model: The network.
        name: Title of the card.
        results: JSON of the evaluation of each verification set, by the name of the set.
        file: Facts about the exported file, by their names.
        license: License of the model; None leaves it to the publisher.
    """
    lines = [
        f"# {escape_markdown(name)}\n",
        *_network(model, file, license),
        *_training(model.metadata.get(CONFIG_KEY), model.metadata.get(SOURCES_KEY)),
        *_datasets(model.metadata.get(CARDS_KEY)),
        *_results(results),
        *_limits(results),
    ]
    return "\n".join(lines) + "\n"


def _network(model: EmbeddingModel, file: Mapping[str, str], license: str | None) -> Iterator[str]:
    size, channels = model.image_size, escape_markdown(model.preprocessing["channels"])
    yield (
        f"Maps an image of a face to an embedding of {model.embedding_size} numbers. "
        "Embeddings of one person have similar directions.\n"
    )
    yield f"- network: {escape_markdown(model.description)}"
    yield f"- input: {size} × {size} pixels, {channels}, aligned by five landmarks as ArcFace's images are"
    for name, fact in file.items():
        yield f"- {name}: {fact}"
    yield "- comparison: cosine similarity"
    if license is not None:
        yield f"- license: {escape_markdown(license)}"
    yield f"- {'license and ' if license is None else ''}intended use: {_TO_FILL_IN}\n"


def _training(config: Any, sources: Any) -> Iterator[str]:
    yield "## Training\n"
    averaged = [
        f"{escape_markdown(_name_of(each.get('model')))} (weight {escape_markdown(_share(each.get('weight')))})"
        for each in (sources if isinstance(sources, list) else [])
        if isinstance(each, Mapping)
    ]
    if averaged:
        yield f"Average of {', '.join(averaged)}. The settings are those of the first one.\n"
    if not isinstance(config, Mapping) or not config:
        yield f"The model file does not contain the settings of the training. Data: {_TO_FILL_IN}\n"
        return
    # The other sections are about the machine and the outputs of the run.
    for section in ("data", "model", "head", "distill", "optim", "train"):
        for key, value in _settings(config.get(section, {}), section):
            yield f"- `{_in_code(key)}`: {escape_markdown(value)}"
    yield ""


def _datasets(cards: Any) -> Iterator[str]:
    """Yield origin and terms of each dataset, as its card has them."""
    known = [card for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
    if not known:
        yield f"Origin and terms of the data, and consent of the people: {_TO_FILL_IN}\n"
        return
    yield "## Data\n"
    for card in known:
        yield f"- {escape_markdown(card.get('name'))}"
        for key in ("origin", "license", "consent", "kind", "people", "images", "digest"):
            value = card.get(key)
            yield f"  - {key}: {_TO_FILL_IN if value in (None, 'unknown') else escape_markdown(value)}"
    yield ""


def _settings(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings that are not empty, with their full keys."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _settings(value, f"{prefix}.{key}")
    elif values not in (None, [], (), ""):
        yield prefix, _without_folders(values)


def _without_folders(value: Any) -> Any:
    """Return a setting with the names of its absolute paths: a card is published, and its folders are private."""
    if isinstance(value, Mapping):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _name_of(model: Any) -> str:
    """Return the name of a model without its folders, of the model file of a run that of the run."""
    path = Path(str(model))
    return path.parent.name if path.name == MODEL_FILE else path.name


def _share(weight: Any) -> Any:
    return f"{weight:.3g}" if isinstance(weight, float) else weight


def _results(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Results\n"
    if not results:
        yield "Not evaluated: `facetrain export --target` adds the results of verification sets.\n"
        return
    for name, found in results.items():
        sizes = ", ".join(f"{found[size]:,.0f} {size}" for size in _SIZES if found.get(size) is not None)
        yield f"- {escape_markdown(name)}: {sizes}"
    yield (
        "\nEach embedding is the sum of those of an image and its mirror image, except for accuracy_no_flip. The "
        "intervals are 95 % bootstrap intervals over subjects.\n"
    )
    yield "| set | metric | value | 95 % interval |"
    yield "|---|---|---|---|"
    for name, found in results.items():
        for metric, value in found.items():
            if metric.startswith(_RATES) and isinstance(value, float):
                interval = _format_interval(metric, found["intervals"]) or "–"
                cells = escape_markdown(name), escape_markdown(metric), _format(metric, value), interval
                yield f"| {' | '.join(cells)} |"
    yield ""
    for name, found in results.items():
        for group in found["groups"]:
            rates = [f"{group['pairs']:,.0f} pairs"]
            for rate in ("fmr", "fnmr"):
                interval = _format_interval(rate, group["intervals"])
                rates.append(f"{rate} {_format(rate, group[rate])}" + (f" ({interval})" if interval else ""))
            place, column, value = map(escape_markdown, (name, group["column"], group["value"]))
            yield f"- {place}, {column} = {value}: {', '.join(rates)}"


def _limits(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Limits\n"
    yield "- A threshold from one set is not valid for other cameras, poses and people: choose it on your own pairs."
    yield "- Images that are not aligned, or smaller than the input, give worse embeddings."
    for name, found in results.items():
        for metric, requirement in found["needs"].items():
            if not metric.startswith(_FOLLOWING):
                yield f"- {escape_markdown(name)} is too small for {escape_markdown(metric)}: it {requirement}."
        for metric, remark in found["remarks"].items():
            if not metric.startswith(_FOLLOWING):
                yield f"- {escape_markdown(name)}, {escape_markdown(metric)}: {remark}."
    if not any(found["groups"] for found in results.values()):
        yield "- Error rates by sex, age or skin tone were not measured (`facetrain eval --slices`); they may differ."
    yield "- Embeddings are biometric data: in many places the law requires consent to store or compare them."


def _format_interval(metric: str, intervals: Mapping[str, Sequence[float]]) -> str:
    """Return `low to high`; empty without an interval."""
    return " to ".join(_format(metric, end) for end in intervals.get(metric, ()))


def _format(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < value < _SMALLEST_PERCENT:
        return f"{value:.1e}"
    # The AUC is close to 1, and needs more digits.
    return f"{value:.5f}" if metric == "auc" else percent(value)


def escape_markdown(value: object) -> str:
    """Return a value as text that Markdown shows as it is, on one line: without markup, tags and control characters.

    Names of files, datasets and groups come from other people.
    """
    # Underscores within words are no markup, and names are full of them.
    return re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", printable(str(value)).translate(_HTML))


def _in_code(text: object) -> str:
    """Return a text for a span of code, which it cannot end."""
    return printable(str(text)).replace("`", "'")
