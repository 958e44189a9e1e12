"""Searching a gallery: whether those who are in it are found, and those who are not stay unknown."""

# Q probes   G gallery entries   D embedding   S subjects   R draws of them   K ranks

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from facetrain.verify import bootstrap
from facetrain.verify.result import Result
from facetrain.verify.roc import Roc, roc, tar_at_far
from facetrain.verify.scored_pairs import REPLICATES, add_replicates

RANKS = (1, 5, 10, 20)
FPIRS = (1e-1, 1e-2)
_AT_ONCE = 1 << 24
"""Similarities held at once: 64 MiB."""


@dataclass(frozen=True)
class Search:
    """How every probe fared in one gallery."""

    subject_Q: np.ndarray
    """Whose each probe is, by a number from 0 on."""
    mated_Q: np.ndarray
    """Whether the gallery has the probe's person."""
    rank_Q: np.ndarray
    """How many entries of others are at least as alike as the best one of the probe's own person; 0 is best."""
    mate_Q: np.ndarray
    """Similarity of the best entry of the own person; −inf where there is none."""
    other_Q: np.ndarray
    """Similarity of the best entry of another."""

    @property
    def curve(self) -> Roc | None:
        """TPIR over FPIR, or None where all probes are mated, or none is.

        FPIR is the share of probes without a mate that find somebody at a threshold, TPIR the share of those
        with one whose mate reaches it, wherever it ranks (1 − FNIR of NIST's FRVT 1:N, NISTIR 8271).
        """
        return roc(self.score_Q, self.mated_Q)

    @property
    def score_Q(self) -> np.ndarray:
        """What is held against the threshold: the mate where there is one, else the most alike."""
        return np.where(self.mated_Q, self.mate_Q, self.other_Q)


def search(
    probe_QD: np.ndarray, probe_subject_Q: np.ndarray, gallery_GD: np.ndarray, gallery_subject_G: np.ndarray
) -> Search:
    """Compare unit embeddings of probes with those of a gallery; subject −1 is of nobody who is sought."""
    found = [
        _search(similarity_qG, probe_subject_Q[part], gallery_subject_G)
        for part, similarity_qG in _blocks(probe_QD, gallery_GD)
    ]
    rank, mate, other = (np.concatenate(column) for column in zip(*found, strict=True))
    return Search(probe_subject_Q, np.isfinite(mate), rank, mate, other)


def _search(
    similarity_qG: np.ndarray, subject_q: np.ndarray, gallery_subject_G: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    probe, entry = np.nonzero(subject_q[:, None] == gallery_subject_G)
    mate_q = np.full(len(subject_q), -np.inf, similarity_qG.dtype)
    np.maximum.at(mate_q, probe, similarity_qG[probe, entry])
    similarity_qG[probe, entry] = -np.inf
    # Of one that is as alike as the mate nobody can say that it ranks behind.
    rank_q = np.count_nonzero(similarity_qG >= mate_q[:, None], axis=1)
    return rank_q, mate_q, similarity_qG.max(1)


def _blocks(probe_QD: np.ndarray, gallery_GD: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    step = max(1, _AT_ONCE // max(len(gallery_GD), 1))
    for start in range(0, len(probe_QD), step):
        part = slice(start, start + step)
        yield part, probe_QD[part] @ gallery_GD.T


def identification_result(
    searches: list[Search],
    *,
    subjects: int,
    ranks: tuple[int, ...] = RANKS,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Result:
    """Return the share of mated probes found within each rank, and TPIR at each FPIR.

    Of several galleries each number is the mean; the curve is the first one's.
    """
    result = Result("identification", {"probes": float(len(searches[0].subject_Q))}, subjects=subjects)
    result.metrics["mated"] = float(np.mean([search.mated_Q.sum() for search in searches]))
    for far in FPIRS:
        _add_open_set(result, searches, far)
    result.curve = searches[0].curve
    for rank in ranks:
        hits = [
            np.mean(search.rank_Q[search.mated_Q] < rank) if search.mated_Q.any() else 0
            for search in searches
        ]
        result.metrics[f"rank{rank}"] = float(np.mean(hits))
    add_replicates(result, _replicates(searches, subjects, ranks, result, replicates, seed))
    return result


def _add_open_set(result: Result, searches: list[Search], far: float) -> None:
    name = f"tpir@{far:.0e}"
    curves = [search.curve for search in searches]
    rates = [None if curve is None else tar_at_far(curve, far) for curve in curves]
    known = [rate for rate in rates if rate is not None]
    result.metrics[name] = float(np.mean(known)) if len(known) == len(rates) else None
    if result.metrics[name] is None:
        unmated = min(int((~search.mated_Q).sum()) for search in searches)
        result.needs[name] = (
            f"needs {round(1 / far):,} probes whose person the gallery lacks; there are {unmated:,}"
        )


def _replicates(
    searches: list[Search], subjects: int, ranks: tuple[int, ...], result: Result, replicates: int, seed: int
) -> dict[str, np.ndarray]:
    told = [far for far in FPIRS if result.metrics[f"tpir@{far:.0e}"] is not None]
    found: dict[str, list[np.ndarray]] = {}
    curves = [
        bootstrap.WeightedCurve(search.score_Q, search.mated_Q, search.subject_Q, search.subject_Q)
        for search in searches
        if told
    ]
    for drawn_RS in bootstrap.draw_subjects(
        subjects, replicates, pairs=len(searches[0].subject_Q), seed=seed
    ):
        for number, rate_R in _rank_rates(searches, drawn_RS, ranks).items():
            found.setdefault(f"rank{number}", []).append(rate_R)
        rates = [curve.rates(drawn_RS) for curve in curves]
        for far in told:
            rate_R = np.mean([bootstrap.true_accept_rates(*rate, far) for rate in rates], axis=0)
            found.setdefault(f"tpir@{far:.0e}", []).append(rate_R)
    return {name: np.concatenate(part) for name, part in found.items()}


def _rank_rates(
    searches: list[Search], drawn_RS: np.ndarray, ranks: tuple[int, ...]
) -> dict[int, np.ndarray]:
    drawn = drawn_RS.astype(np.float64)
    subjects = drawn.shape[1]
    rates: dict[int, list[np.ndarray]] = {rank: [] for rank in ranks}
    for search in searches:
        mated = search.subject_Q[search.mated_Q]
        probes_R = drawn @ np.bincount(mated, minlength=subjects)
        for rank in ranks:
            hit_S = np.bincount(mated, weights=search.rank_Q[search.mated_Q] < rank, minlength=subjects)
            rates[rank].append(
                np.divide(drawn @ hit_S, probes_R, out=np.full(len(drawn), np.nan), where=probes_R > 0)
            )
    return {rank: np.mean(rate, axis=0) for rank, rate in rates.items()}


_AT_ONCE = 1 << 24
"""Similarities held at once: 64 MiB."""


def top_k(probe_QD: np.ndarray, gallery_GD: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the gallery that are most alike, best first, and their cosine: (Q, K) each.

    Embeddings have length 1; K is `count`, or the gallery's size where that is less.
    """
    kept = min(count, len(gallery_GD))
    entry_QK = np.empty((len(probe_QD), kept), np.int64)
    cosine_QK = np.empty((len(probe_QD), kept), np.float32)
    step = max(1, _AT_ONCE // max(len(gallery_GD), 1))
    for start in range(0, len(probe_QD), step):
        part = slice(start, start + step)
        cosine_qG = probe_QD[part] @ gallery_GD.T
        best_qK = np.argpartition(-cosine_qG, kept - 1, axis=1)[:, :kept]
        order_qK = np.argsort(-np.take_along_axis(cosine_qG, best_qK, 1), axis=1, kind="stable")
        entry_QK[part] = np.take_along_axis(best_qK, order_qK, 1)
        cosine_QK[part] = np.take_along_axis(cosine_qG, entry_QK[part], 1)
    return entry_QK, cosine_QK
