"""Each protocol from pictures to results."""

# N pictures   T templates

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from facetrain.errors import ModelError
from facetrain.verify.distractors import distractor_result
from facetrain.verify.embed import PictureEmbedder
from facetrain.verify.identification import Search, identification_result, search
from facetrain.verify.ijb import IjbSet, Roster
from facetrain.verify.pairs import PairSet
from facetrain.verify.result import Result
from facetrain.verify.roc import threshold_at
from facetrain.verify.scored import REPLICATES, ScoredPairs, assess_pairs
from facetrain.verify.search_sets import DistractorSet, SearchSet
from facetrain.verify.slices import Table, slice_groups
from facetrain.verify.subjects import numbers_of, subjects_of_pairs
from facetrain.verify.targets import Target
from facetrain.verify.templates import pool_templates, score_pairs
from facetrain.verify.verification import verification_result


@dataclass(frozen=True)
class Options:
    """What a user may choose of every protocol."""

    replicates: int = REPLICATES
    """Draws of the bootstrap; 0 gives no intervals."""
    seed: int = 0
    flip: bool = True
    """Add the embedding of the mirror image, where the protocol leaves it open. Sets of pairs have both."""
    detection: bool = True
    """Weight IJB's pictures by the detector's score."""
    table: Table | None = None
    """By what a set of pairs is sliced, and who is in its pictures."""
    slice_fmr: float | None = None
    """Slice at the threshold with this false match rate over all pairs; None for that of the folds."""


def assess(target: Target, embedder: PictureEmbedder, options: Options) -> dict[str, Result]:
    """Embed a set and return its results by name; IJB's 1:N stands beside its 1:1. Collective.

    Raises:
        ModelError: the network's embeddings are not finite.
    """
    match target:
        case PairSet():
            return {target.name: _pairs(target, embedder, options)}
        case IjbSet():
            return _ijb(target, embedder, options)
        case SearchSet():
            return {target.name: _search_set(target, embedder, options)}
        case DistractorSet():
            return {target.name: _distractors(target, embedder, options)}


def _pairs(pairs: PairSet, embedder: PictureEmbedder, options: Options) -> Result:
    plain, mirrored = embedder.both(pairs.images, name=pairs.name)
    _check_finite(plain, pairs.name)
    if options.table and options.table.subject is not None:
        pairs = replace(pairs, subject=options.table.subject)
    draws = {"replicates": options.replicates, "seed": options.seed}
    result, scored = verification_result(plain, mirrored, pairs, **draws)
    if options.table:
        threshold = _common_threshold(result, options.slice_fmr)
        result.groups = slice_groups(scored, options.table.columns, threshold, **draws)
    return result


def _common_threshold(result: Result, fmr: float | None) -> float:
    if fmr is None or result.curve is None:
        assert result.folds is not None, "pairs have folds"
        return 1 - float(result.folds.threshold_F.mean()) / 2
    return threshold_at(result.curve, fmr)


def _ijb(ijb: IjbSet, embedder: PictureEmbedder, options: Options) -> dict[str, Result]:
    embedding_ND = embedder.summed(ijb.encoded, name=ijb.name, flip=options.flip, crop=ijb.crop)
    _check_finite(embedding_ND, ijb.name)
    weight_N = ijb.detection if options.detection else None
    return ijb_results(embedding_ND, weight_N, ijb, replicates=options.replicates, seed=options.seed)


def ijb_results(
    embedding_ND: np.ndarray, weight_N: np.ndarray | None, ijb: IjbSet, *, replicates: int, seed: int = 0
) -> dict[str, Result]:
    """Return the results of 1:1, and of 1:N where its lists are there, from the embeddings of the pictures."""
    template, unit_TD = pool_templates(embedding_ND, ijb.template, ijb.medium, weight_N)
    first, second = np.searchsorted(template, ijb.first), np.searchsorted(template, ijb.second)
    subject = _template_subjects(template, first, second, ijb)
    pairs = ScoredPairs(score_pairs(unit_TD, first, second), ijb.same, first, second, subject)
    found = {ijb.name: assess_pairs(pairs, protocol="templates", replicates=replicates, seed=seed)}
    if ijb.probes is not None:
        searches, subjects = _galleries(template, unit_TD, ijb.galleries, ijb.probes)
        found[f"{ijb.name}_1n"] = identification_result(
            searches, subjects=subjects, replicates=replicates, seed=seed
        )
    return found


def _template_subjects(
    template: np.ndarray, first: np.ndarray, second: np.ndarray, ijb: IjbSet
) -> np.ndarray:
    """Return whose each template is: what the 1:N lists say, and what genuine pairs connect."""
    lists = [*ijb.galleries.values(), *([ijb.probes] if ijb.probes else [])]
    firsts, seconds = [first[ijb.same]], [second[ijb.same]]
    if lists:
        listed = np.searchsorted(template, np.concatenate([roster.template for roster in lists]))
        owner = np.concatenate([roster.subject for roster in lists])
        order = np.argsort(owner, kind="stable")
        joined = np.diff(owner[order]) == 0
        firsts.append(listed[order][:-1][joined])
        seconds.append(listed[order][1:][joined])
    one, other = np.concatenate(firsts), np.concatenate(seconds)
    return subjects_of_pairs(one, other, np.ones(len(one), bool), len(template))


def _galleries(
    template: np.ndarray, unit_TD: np.ndarray, galleries: dict[str, Roster], probes: Roster
) -> tuple[list[Search], int]:
    everybody = np.concatenate([probes.subject, *(roster.subject for roster in galleries.values())])
    known = numbers_of(everybody.tolist())
    probe_subject, start, searches = known[: len(probes.subject)], len(probes.subject), []
    for roster in galleries.values():
        subject = known[start : start + len(roster.subject)]
        start += len(roster.subject)
        entry_TD = unit_TD[np.searchsorted(template, roster.template)]
        probe_TD = unit_TD[np.searchsorted(template, probes.template)]
        searches.append(search(probe_TD, probe_subject, entry_TD, subject))
    return searches, int(probe_subject.max()) + 1


def _search_set(found: SearchSet, embedder: PictureEmbedder, options: Options) -> Result:
    probe, gallery = (
        _unit(embedder.summed(pictures, name=f"{found.name} {part}", flip=options.flip), found.name)
        for part, pictures in (("probes", found.probes), ("gallery", found.gallery))
    )
    searched = search(probe, found.probe_subject, gallery, found.gallery_subject)
    return identification_result(
        [searched],
        subjects=int(found.probe_subject.max()) + 1,
        replicates=options.replicates,
        seed=options.seed,
    )


def _distractors(found: DistractorSet, embedder: PictureEmbedder, options: Options) -> Result:
    probe, distractor = (
        _unit(embedder.summed(pictures, name=f"{found.name} {part}", flip=options.flip), found.name)
        for part, pictures in (("probes", found.probes), ("distractors", found.distractors))
    )
    return distractor_result(
        probe, found.subject, distractor, replicates=options.replicates, seed=options.seed
    )


def _unit(embedding_ND: np.ndarray, name: str) -> np.ndarray:
    _check_finite(embedding_ND, name)
    return embedding_ND / np.maximum(np.linalg.norm(embedding_ND, axis=1, keepdims=True), 1e-12)


def _check_finite(embedding_ND: np.ndarray, name: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(embedding_ND).all(1))
    if len(wrong):
        raise ModelError(
            f"{name}: the embedding of picture {wrong[0]} is not finite; the network has diverged"
        )
