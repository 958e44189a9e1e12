"""Comparison of a host with the leader: the same command, versions of packages, data and weights."""

from __future__ import annotations

import json
import os
from typing import Any

from facetrain.config.changes import differences, lookup
from facetrain.config.loading import plain_config
from facetrain.config.own_code import own_places
from facetrain.config.schema import Config
from facetrain.distributed.ranks import Ranks
from facetrain.errors import UsageError
from facetrain.remote.address import is_remote
from facetrain.run.asked_config import asked_config
from facetrain.run.folder.data_digests import (
    describe_difference,
    digest_inputs,
    digest_labels,
    digest_weights,
)
from facetrain.run.folder.environment import software_of_host
from facetrain.run.parts.open_data import RunData, open_data
from facetrain.run.request import FOLDER_TERM, TrainRequest
from facetrain.run.run_claim import Claim
from facetrain.run.run_plan import RunPlan


def compare_commands(ranks: Ranks, request: TrainRequest, claim: Claim) -> None:
    """Compare the versions, the config and the options of this host with those of the leader.

    Raises:
        UsageError: something differs.
    """
    if ranks.is_leader or not ranks.speaks_for_host:
        return
    _compare_versions(ranks, claim.versions)
    # Of a run that continues, only its folder has the config, which another host need not have yet.
    if request.command == claim.terms["command"] == "train":
        where = request.config if isinstance(request.config, str) else "the config"
        _require_equal(ranks, where, claim.given, asked_config(request).given)
    _compare_terms(ranks, request.terms, claim.terms)


def open_same_data(ranks: Ranks, plan: RunPlan, config: Config) -> RunData:
    """Open what the run reads, and compare it with what the leader has.

    The first rank of a host compares the files. The others have the same, but an image folder may change between the
    openings of two ranks.

    Raises:
        UsageError: the data, a verification set or the weights of this host are others.
        DataError: they cannot be read.
    """
    data = open_data(config)
    if not ranks.speaks_for_host:
        if digest_labels(data.source) != plan.inputs["dataset"]:
            raise UsageError(
                f"{config.data.train} (data.train): was changed while the run opened it; start the command again"
            )
        return data
    values, own = plain_config(config), digest_inputs(config, data.source, data.sets)
    places = {f"set {each.name}": str(each.path) for each in data.sets}
    places |= {f"code {key}": place for key, place in own_places(config).items()}
    if differing := [name for name, expected in plan.inputs.items() if own.get(name) != expected]:
        names, keys, words = describe_difference(differing)
        place = ", ".join(places.get(name) or str(lookup(values, keys[0])) for name in names)
        raise UsageError(
            f"{place} ({', '.join(keys)}): other {words} than rank 0 on {ranks.place(0)} has; copy them to all hosts"
        )
    for key, digest in digest_weights(config).items() if plan.weights else ():
        if digest != plan.weights.get(key):
            raise UsageError(
                f"{lookup(values, key)} ({key}): another file than rank 0 on {ranks.place(0)} has; copy the same to "
                "all hosts"
            )
    return data


def _compare_versions(ranks: Ranks, expected: dict[str, str]) -> None:
    own = software_of_host()
    for name in sorted({*own, *expected}):
        if own.get(name) != expected.get(name):
            raise UsageError(
                f"{name} is {own.get(name, 'missing')}, and rank 0 on {ranks.place(0)} has "
                f"{expected.get(name, 'none')}; install the same versions on all hosts"
            )


def _compare_terms(ranks: Ranks, own: dict[str, Any], expected: dict[str, Any]) -> None:
    if own["command"] != expected["command"]:  # their options differ with it
        own, expected = ({"command": terms["command"]} for terms in (own, expected))
    # Both as this host understands them: one may have given the folder by its absolute path.
    _require_equal(ranks, "the command line", _with_place(expected), _with_place(own), absent="absent")


def _with_place(terms: dict[str, Any]) -> dict[str, Any]:
    """Return the terms with the absolute path of the run folder, without links, if they name one."""
    folder = terms.get(FOLDER_TERM)
    if not folder:
        return terms
    return terms | {FOLDER_TERM: folder.rstrip("/") if is_remote(folder) else os.path.realpath(folder)}


def _require_equal(
    ranks: Ranks, where: str, expected: dict[str, Any], own: dict[str, Any], *, absent: str = "null"
) -> None:
    def text(value: Any) -> str:
        return absent if value is None else json.dumps(value)

    changes = ", ".join(
        f"{each.key} is {text(each.now)}, not {text(each.before)}" for each in differences(expected, own)
    )
    if changes:
        raise UsageError(
            f"{where}: {changes} as for rank 0 on {ranks.place(0)}; give the same config and options on all hosts"
        )
