"""Each protocol from images to results."""

# N images   T templates

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

import numpy as np

from facetrain.distributed import collectives
from facetrain.errors import ModelError
from facetrain.verify.embedder import ImageEmbedder
from facetrain.verify.evaluation_sets import EvaluationSet
from facetrain.verify.identification import Search, identification_result, search
from facetrain.verify.ijb import IjbSet, TemplateSubjects
from facetrain.verify.megaface import megaface_result
from facetrain.verify.pair_set import PairSet
from facetrain.verify.result import Result
from facetrain.verify.roc import threshold_at
from facetrain.verify.scored_pairs import REPLICATES, ScoredPairs, pair_result
from facetrain.verify.search_sets import DistractorSet, SearchSet
from facetrain.verify.slices import SliceTable, slice_groups
from facetrain.verify.subjects import connected_subjects, dense_ids
from facetrain.verify.templates import pool_templates, score_pairs
from facetrain.verify.verification import verification_result


class BootstrapOptions(TypedDict):
    """How often the bootstrap draws, and from which seed."""

    replicates: int
    seed: int


@dataclass(frozen=True)
class Options:
    """What a user may choose of every protocol."""

    replicates: int = REPLICATES
    """BootstrapOptions of the bootstrap; 0 gives no intervals."""
    seed: int = 0
    flip: bool = True
    """Add the embedding of the mirror image, where the protocol leaves it open. Sets of pairs have both."""
    detection: bool = True
    """Weight IJB's images by the detector's score."""
    table: SliceTable | None = None
    """By what a set of pairs is sliced, and who is in its images."""
    slice_fmr: float | None = None
    """Slice at the threshold with this false match rate over all pairs; None for that of the folds."""

    @property
    def draws(self) -> BootstrapOptions:
        """What every bootstrap is told."""
        return {"replicates": self.replicates, "seed": self.seed}


def evaluate_set(target: EvaluationSet, embedder: ImageEmbedder, options: Options) -> dict[str, Result]:
    """Embed a set and return its results by name; IJB's 1:N stands beside its 1:1.

    Collective: all ranks embed, the leader alone reckons, and the others return nothing.

    Raises:
        ModelError: the network's embeddings are not finite.
    """
    embedded = _embed(target, embedder, options)
    for embedding_ND in embedded:
        wrong = np.flatnonzero(~np.isfinite(embedding_ND).all(1))
        if len(wrong):
            raise ModelError(
                f"{target.name}: the embedding of image {wrong[0]} is not finite; the network has diverged"
            )
    # The numbers of a large set take minutes and gigabytes: once, not on every rank.
    return {} if collectives.rank() else results(target, embedded, options)


def _embed(target: EvaluationSet, embedder: ImageEmbedder, options: Options) -> tuple[np.ndarray, ...]:
    summed = partial(embedder.embed, flip=options.flip)
    match target:
        case PairSet():
            return embedder.embed_plain_and_mirrored(target.images, name=target.name)
        case IjbSet():
            return (summed(target.encoded, name=target.name, crop=target.crop),)
        case SearchSet():
            probes = summed(target.probes, name=f"{target.name} probes")
            return probes, summed(target.gallery, name=f"{target.name} gallery")
        case DistractorSet():
            probes = summed(target.probes, name=f"{target.name} probes")
            return probes, summed(target.distractors, name=f"{target.name} distractors")


def results(target: EvaluationSet, embedded: tuple[np.ndarray, ...], options: Options) -> dict[str, Result]:
    """Return the results of a set by name, from its embeddings float32 (N, D) before they are scaled to length 1.

    Of pairs, those of the images and of their mirror images; of a search, those of the probes and of the
    gallery or the distractors.
    """
    match target:
        case PairSet():
            return {target.name: _pairs(target, options, *embedded)}
        case IjbSet():
            return _ijb(target, options, *embedded)
        case SearchSet():
            return {target.name: _search_set(target, options, *embedded)}
        case DistractorSet():
            probe, distractor = map(_unit, embedded)
            result = megaface_result(probe, target.subject, distractor, **options.draws)
            result.metrics["excluded_images"] = float(target.noises)
            return {target.name: result}


def _pairs(pairs: PairSet, options: Options, plain_ND: np.ndarray, mirrored_ND: np.ndarray) -> Result:
    if options.table and options.table.subject is not None:
        pairs = replace(pairs, subject=options.table.subject)
    result, scored = verification_result(plain_ND, mirrored_ND, pairs, **options.draws)
    if options.table:
        threshold = _common_threshold(result, options.slice_fmr)
        result.groups = slice_groups(scored, options.table.columns, threshold, **options.draws)
    return result


def _common_threshold(result: Result, fmr: float | None) -> float:
    if fmr is None or result.curve is None:
        assert result.folds is not None, "pairs have folds"
        return 1 - float(result.folds.threshold_F.mean()) / 2
    return threshold_at(result.curve, fmr)


def _ijb(ijb: IjbSet, options: Options, embedding_ND: np.ndarray) -> dict[str, Result]:
    weight_N = ijb.detection if options.detection else None
    template, unit_TD = pool_templates(embedding_ND, ijb.template, ijb.medium, weight_N)
    first, second = np.searchsorted(template, ijb.first), np.searchsorted(template, ijb.second)
    subject = _template_subjects(template, first, second, ijb)
    pairs = ScoredPairs(score_pairs(unit_TD, first, second), ijb.same, first, second, subject)
    found = {ijb.name: pair_result(pairs, protocol="templates", **options.draws)}
    if ijb.probes is not None:
        searches, subjects = _galleries(template, unit_TD, ijb.galleries, ijb.probes)
        found[f"{ijb.name}_1n"] = identification_result(searches, subjects=subjects, **options.draws)
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
    return connected_subjects(one, other, np.ones(len(one), bool), len(template))


def _galleries(
    template: np.ndarray,
    unit_TD: np.ndarray,
    galleries: dict[str, TemplateSubjects],
    probes: TemplateSubjects,
) -> tuple[list[Search], int]:
    everybody = np.concatenate([probes.subject, *(roster.subject for roster in galleries.values())])
    known = dense_ids(everybody.tolist())
    probe_subject, start, searches = known[: len(probes.subject)], len(probes.subject), []
    for roster in galleries.values():
        subject = known[start : start + len(roster.subject)]
        start += len(roster.subject)
        entry_TD = unit_TD[np.searchsorted(template, roster.template)]
        probe_TD = unit_TD[np.searchsorted(template, probes.template)]
        searches.append(search(probe_TD, probe_subject, entry_TD, subject))
    return searches, int(probe_subject.max()) + 1


def _search_set(found: SearchSet, options: Options, probe_ND: np.ndarray, gallery_ND: np.ndarray) -> Result:
    searched = search(_unit(probe_ND), found.probe_subject, _unit(gallery_ND), found.gallery_subject)
    return identification_result([searched], subjects=int(found.probe_subject.max()) + 1, **options.draws)


def _unit(embedding_ND: np.ndarray) -> np.ndarray:
    return embedding_ND / np.maximum(np.linalg.norm(embedding_ND, axis=1, keepdims=True), 1e-12)
