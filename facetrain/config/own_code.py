"""The code that a config names: its places, and whether they may run."""

from __future__ import annotations

from facetrain import own_parts
from facetrain.config.schema import Config


def own_places(config: Config) -> dict[str, str]:
    """Return the places of code (MODULE:NAME) that a config names, by its keys."""
    named = {"model.backbone": config.model.backbone, "head.margin.type": config.head.margin.type}
    named |= {f"data.augment.own[{n}].type": each.type for n, each in enumerate(config.data.augment.own)}
    named |= {
        f"log.sinks[{n}]": sink if isinstance(sink, str) else sink.type
        for n, sink in enumerate(config.log.sinks)
    }
    return {key: name for key, name in named.items() if own_parts.is_place(name)}


def allow_option(config: Config) -> str:
    """Return the option of a command that continues a run, see `own_parts.allow_option`."""
    return own_parts.allow_option(bool(own_places(config)))


def allow_code_of(config: Config) -> None:
    """Let the code that a config of the user names run in this process."""
    own_parts.allow(own_places(config).values())


def require_code_allowed(config: Config, where: str) -> None:
    """Check that the code that a config of a run folder or a checkpoint names may run.

    Raises:
        ConfigError: it was not allowed; `where` names the file.
    """
    for key, place in own_places(config).items():
        own_parts.require_allowed(place, f"{where}: {key}")


def code_digests(config: Config) -> dict[str, str]:
    """Return the SHA-256 of the source file of each place that a config names, by its key; imports them.

    Raises:
        ConfigError: a place was not allowed, cannot be imported, or its file has changed since.
    """
    places = own_places(config)
    for key, place in places.items():
        own_parts.require_unchanged(place, key)
    return {key: own_parts.source_digest(place) for key, place in places.items()}
