"""Protocols: from an evaluation set and a network to results."""

# N images   T templates   P pairs   D embedding

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from facetrain.distinct import dense_ids
from facetrain.distributed import collectives
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.normalization import l2_normalize, require_finite
from facetrain.verify.metrics.identification import Search, identification_result, search
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.scored_pairs import ScoredPairs, add_fold_accuracy, pair_result
from facetrain.verify.metrics.templates import pool_templates, score_pairs
from facetrain.verify.pair_protocol import add_slices_of_table, verification_result
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.sets.ijb import IjbSet, TemplateSubjects
from facetrain.verify.sets.open_sets import AnySet
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.sets.search_sets import SearchSet
from facetrain.verify.sets.slice_table import NO_SLICES, SliceTable
from facetrain.verify.sets.subjects import connected_subjects


def evaluate_set(
    target: AnySet,
    embedder: ImageEmbedder,
    options: EvaluationOptions,
    table: SliceTable = NO_SLICES,
    *,
    gallery: ImageEmbedder | None = None,
) -> dict[str, Result]:
    """Embed a set and return its results by name; IJB's 1:N protocol is a second result, `NAME_1n`.

    Collective: all ranks embed. Only the leader computes the metrics, which take minutes and gigabytes for a
    large set; the other ranks return an empty dict. `table` is the slice table of a set of pairs. `gallery` embeds
    the galleries, and the second image or template of each pair; None for `embedder`.

    Raises:
        ModelError: an embedding is not finite.
    """
    embeddings = _embed(target, embedder, options, gallery)
    # On all ranks, which all have the embeddings: none waits for one that has failed.
    for embedding_ND in embeddings:
        require_finite(embedding_ND, target.name)
    if collectives.rank():
        return {}
    match target:
        case PairSet():
            plain_ND, mirrored_ND = embeddings
            result = verification_result(
                plain_ND, mirrored_ND, target, table=table, slice_fmr=options.slice_fmr, draws=options.draws
            )
            return {target.name: result}
        case IjbSet():
            return _ijb_results(target, options, *embeddings)
        case SearchSet():
            return {target.name: _search_set_result(target, options, *embeddings)}


def _embed(
    target: AnySet,
    embedder: ImageEmbedder,
    options: EvaluationOptions,
    gallery: ImageEmbedder | None,
) -> tuple[np.ndarray, ...]:
    """Return embeddings, float32 (N, D) each, not normalized.

    Of a `PairSet`, they are those of the images and of the mirror images; of an `IjbSet`, those of all images by each
    model; of a `SearchSet`, those of probes and gallery.
    """
    match target:
        case PairSet() if gallery is not None:
            return _embed_sides(target, embedder, gallery)
        case PairSet():
            # The protocol of pairs reports the accuracy with and without the mirror image.
            return embedder.embed_plain_and_mirrored(
                target.images, name=target.name, landmarks=target.landmarks
            )
        case IjbSet():
            # A template may be on either side of a pair: both models embed all images.
            return tuple(
                each.embed(
                    target.encoded,
                    name=target.name,
                    flip=options.flip,
                    crop=target.crop,
                    landmarks=target.aligned_landmarks,
                )
                for each in (embedder, gallery)
                if each is not None
            )
        case SearchSet():
            probes = embedder.embed(target.probes, name=f"{target.name} probes", flip=options.flip)
            entries = gallery or embedder
            return probes, entries.embed(target.gallery, name=f"{target.name} gallery", flip=options.flip)


def _embed_sides(
    pairs: PairSet, embedder: ImageEmbedder, gallery: ImageEmbedder
) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings of images and mirror images, of the second image of each pair by `gallery`."""
    sides = []
    for side, (name, each) in enumerate({"first": embedder, "second": gallery}.items()):
        landmarks = None if pairs.landmarks is None else pairs.landmarks[side::2]
        rows_2ND = np.stack(
            each.embed_plain_and_mirrored(
                pairs.images[side::2], name=f"{pairs.name} {name} images", landmarks=landmarks
            )
        )
        for rows_ND in rows_2ND:
            require_finite(rows_ND, f"{pairs.name} {name} images")
        sides.append(rows_2ND)
    first, second = sides
    # A cosine does not depend on the lengths, which are also the quality of an image: both models then have one scale.
    second *= np.linalg.norm(first, axis=2).mean() / np.linalg.norm(second, axis=2).mean()
    plain_ND, mirrored_ND = np.stack(sides, axis=2).reshape(2, len(pairs.images), -1)
    return plain_ND, mirrored_ND


def scores_result(scored: ScoredPairs, table: SliceTable, options: EvaluationOptions) -> Result:
    """Return the metrics of pairs that another system scored, with its slices."""
    result = pair_result(scored, protocol="verification", draws=options.draws)
    add_fold_accuracy(result, scored, draws=options.draws)
    add_slices_of_table(result, scored, table, fmr=options.slice_fmr, draws=options.draws)
    return result


def _ijb_results(
    ijb: IjbSet, options: EvaluationOptions, embedding_ND: np.ndarray, gallery_ND: np.ndarray | None = None
) -> dict[str, Result]:
    pool = partial(pool_templates, template_N=ijb.template, media_N=ijb.medium, weight_N=ijb.detection)
    template, unit_TD = pool(embedding_ND)
    entry_TD = unit_TD if gallery_ND is None else pool(gallery_ND)[1]
    # Ids become rows of the pooled templates, which are sorted by id.
    first, second = np.searchsorted(template, ijb.first), np.searchsorted(template, ijb.second)
    subject = _template_subjects(template, first, second, ijb)
    pairs = ScoredPairs(score_pairs(unit_TD, entry_TD, first, second), ijb.same, first, second, subject)
    results = {ijb.name: pair_result(pairs, protocol="templates", draws=options.draws)}
    if ijb.probes is not None:
        searches, subjects = _search_galleries(template, unit_TD, entry_TD, ijb.galleries, ijb.probes)
        results[ijb.search_name] = identification_result(searches, subjects=subjects, draws=options.draws)
    return results


def _template_subjects(
    template: np.ndarray, first: np.ndarray, second: np.ndarray, ijb: IjbSet
) -> np.ndarray:
    """Return the subject id of each template, int (T,), from the 1:N lists and the genuine pairs.

    The 1:N lists do not contain all templates of the 1:1 pairs. Each template is connected with its partners in genuine
    pairs, and with its listed subject, which is an item behind the templates. One that is in no pair has −1: the
    bootstrap draws as many subjects as there are ids, and people without a comparison would narrow its intervals.
    """
    lists = [*ijb.galleries.values(), *([ijb.probes] if ijb.probes else [])]
    names = dense_ids([subject for part in lists for subject in part.subject.tolist()])
    listed = [np.searchsorted(template, part.template) for part in lists]
    one_side = np.concatenate([first[ijb.same], *listed])
    other_side = np.concatenate([second[ijb.same], len(template) + names])
    count = len(template) + len(names)
    subject_T = connected_subjects(one_side, other_side, np.ones(len(one_side), bool), count)[: len(template)]
    in_pair_T = np.zeros(len(template), bool)
    in_pair_T[first] = in_pair_T[second] = True
    subject_T[in_pair_T] = np.unique(subject_T[in_pair_T], return_inverse=True)[1]
    subject_T[~in_pair_T] = -1
    return subject_T


def _search_galleries(
    template: np.ndarray,
    unit_TD: np.ndarray,
    entry_TD: np.ndarray,
    galleries: dict[str, TemplateSubjects],
    probes: TemplateSubjects,
) -> tuple[list[Search], int]:
    """Search all probes in each gallery; return the searches and the number of subjects of the probes.

    `unit_TD` has the embeddings of the templates as probes, `entry_TD` as entries of a gallery.
    """
    all_subjects = np.concatenate([probes.subject, *(gallery.subject for gallery in galleries.values())])
    # Probes come first: their ids are then 0 to S − 1, without gaps, as the bootstrap needs them.
    ids = dense_ids(all_subjects.tolist())
    probe_subject, start, searches = ids[: len(probes.subject)], len(probes.subject), []
    probe_TD = unit_TD[np.searchsorted(template, probes.template)]
    for name, gallery in galleries.items():
        subject = ids[start : start + len(gallery.subject)]
        start += len(gallery.subject)
        entries = entry_TD[np.searchsorted(template, gallery.template)]
        searches.append(replace(search(probe_TD, probe_subject, entries, subject), gallery=name))
    return searches, int(probe_subject.max()) + 1


def _search_set_result(
    target: SearchSet, options: EvaluationOptions, probe_ND: np.ndarray, gallery_ND: np.ndarray
) -> Result:
    probe, gallery = l2_normalize(probe_ND), l2_normalize(gallery_ND)
    searched = search(probe, target.probe_subject, gallery, target.gallery_subject)
    subjects = int(target.probe_subject.max()) + 1
    return identification_result([searched], subjects=subjects, draws=options.draws)
