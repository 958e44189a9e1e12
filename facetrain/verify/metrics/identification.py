"""1:N identification: search in a gallery, and its metrics.

The terms follow NIST's FRVT 1:N (Grother, Ngan and Hanaoka, NISTIR 8271, 2019) and ISO/IEC 19795-1:

    mated probe          the gallery has an entry of the probe's person, its mate
    nonmated probe       it has none
    rank-k rate          share of mated probes with a mate among the k entries of the highest similarity
    FPIR                 share of nonmated probes with an entry at or above the threshold
    TPIR = 1 − FNIR      share of mated probes with a mate at or above the threshold
"""

# Q probes   q probes of one block   G gallery entries   D embedding   S subjects   R draws of them

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from facetrain.text import count_text
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.curve_metrics import tar_at_far, value_of
from facetrain.verify.metrics.draws import DRAWS, Draws
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.roc import FPIRS, Roc, can_measure, least_impostors, roc
from facetrain.verify.metrics.scored_pairs import add_replicates

RANKS = (1, 5, 10, 20)
_NEEDS_MATES = "needs probes whose person is in the gallery; there are none"
_MAX_SIMILARITIES = 1 << 24
"""Largest number of similarities in memory at once: 64 MiB of float32."""


@dataclass(frozen=True)
class Search:
    """Outcome of the search of every probe in one gallery."""

    subject_Q: np.ndarray
    """Subject id of each probe, int (Q,) from 0."""
    mated_Q: np.ndarray
    """True if the gallery has the person of the probe, bool (Q,)."""
    rank_Q: np.ndarray
    """Number of entries of other people at least as similar as the best mate, int (Q,); 0 is the best rank."""
    mate_Q: np.ndarray
    """Similarity of the best mate, float (Q,); −inf for a nonmated probe."""
    other_Q: np.ndarray
    """Similarity of the best entry of another person, float (Q,)."""
    entries: int
    """Number of entries of the gallery."""
    gallery: str = ""
    """Name of the gallery, if there are several."""

    @property
    def curve(self) -> Roc | None:
        """TPIR (`tar`) over FPIR (`far`), or None if there are no mated or no nonmated probes.

        A mate that reaches the threshold counts at any rank: TPIR is 1 − FNIR(N, R, T) of NISTIR 8271 with
        the rank limit R equal to the gallery size N.
        """
        return roc(self.score_Q, self.mated_Q)

    @property
    def score_Q(self) -> np.ndarray:
        """Similarity that is compared with the threshold: of the best mate, or of the best entry if nonmated."""
        return np.where(self.mated_Q, self.mate_Q, self.other_Q)


def search(
    probe_QD: np.ndarray, probe_subject_Q: np.ndarray, gallery_GD: np.ndarray, gallery_subject_G: np.ndarray
) -> Search:
    """Compare unit embeddings of probes, float (Q, D), with the unit embeddings of a gallery, float (G, D).

    Subjects are ids, int (Q,) and (G,). A gallery entry with subject −1 is a distractor: it matches no probe.

    Raises:
        ValueError: there are no probes or no entries, the shapes are others, an embedding has a value that is not
            finite, or a probe has a negative subject.
    """
    _require_embeddings(probe_QD, probe_subject_Q, gallery_GD, gallery_subject_G)
    step = max(1, _MAX_SIMILARITIES // len(gallery_GD))
    blocks = [slice(start, start + step) for start in range(0, len(probe_QD), step)]
    outcomes = [
        _rank_mates(probe_QD[block] @ gallery_GD.T, probe_subject_Q[block], gallery_subject_G)
        for block in blocks
    ]
    rank, mate, other = (np.concatenate(column) for column in zip(*outcomes, strict=True))
    return Search(probe_subject_Q, np.isfinite(mate), rank, mate, other, len(gallery_GD))


def _require_embeddings(
    probe_QD: np.ndarray, probe_subject_Q: np.ndarray, gallery_GD: np.ndarray, gallery_subject_G: np.ndarray
) -> None:
    for faces, embedding, subject in (
        ("probes", probe_QD, probe_subject_Q),
        ("gallery", gallery_GD, gallery_subject_G),
    ):
        if embedding.ndim != 2 or not len(embedding) or subject.shape != (len(embedding),):
            raise ValueError(
                f"{faces}: embeddings of shape {embedding.shape} and subjects of shape {subject.shape}; give at least "
                "one embedding, and one subject for each"
            )
        # A probe of NaN would be counted as nonmated. The sum shows it without an array of all answers.
        if not np.isfinite(embedding.sum(dtype=np.float64)):
            raise ValueError(f"{faces}: an embedding has a number that is not finite")
    if probe_subject_Q.min() < 0:  # each would be a mate of the distractors
        raise ValueError("probes: a subject is negative; give each unknown person an id of its own")
    if probe_QD.shape[1] != gallery_GD.shape[1]:
        raise ValueError(
            f"probes of {probe_QD.shape[1]} and a gallery of {gallery_GD.shape[1]} numbers per embedding"
        )


def _rank_mates(
    similarity_qG: np.ndarray, subject_q: np.ndarray, gallery_subject_G: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rank, best mate and best other entry of each probe, (q,) each. Overwrites `similarity_qG`."""
    probe, entry = np.nonzero(subject_q[:, None] == gallery_subject_G)
    mate_q = np.full(len(subject_q), -np.inf, similarity_qG.dtype)
    np.maximum.at(mate_q, probe, similarity_qG[probe, entry])
    similarity_qG[probe, entry] = -np.inf
    # `>=`: an entry of another person with the same similarity counts as ranked before the mate. The order of
    # ties would otherwise decide, and a network that maps all images to one point would have rank 1.
    rank_q = np.count_nonzero(similarity_qG >= mate_q[:, None], axis=1)
    return rank_q, mate_q, similarity_qG.max(1)


def identification_result(
    searches: list[Search],
    *,
    subjects: int,
    draws: Draws = DRAWS,
) -> Result:
    """Return `rankK` for each rank and `tpir@FPIR` for each of `FPIRS`, with their intervals.

    With several galleries (IJB has two), each metric is the mean over the galleries, and each gallery has a curve: a
    mean of two curves would have no threshold. `subjects` is the number of subject ids of the probes; the bootstrap
    draws probes by subject and keeps the galleries. Rank-k rates rest on the subjects with a mate; TPIRs, whose
    thresholds follow from the nonmated probes, on those of the kind of probes that fewer subjects have, as metrics of
    both kinds of pairs do.
    """
    counts: dict[str, float | None] = {"probes": float(len(searches[0].subject_Q))}
    result = Result("identification", counts, subjects=subjects)
    result.metrics["mated"] = float(np.mean([search.mated_Q.sum() for search in searches]))
    result.metrics["entries"] = float(np.mean([search.entries for search in searches]))
    curves = [curve for search in searches if (curve := search.curve) is not None]
    for fpir in FPIRS:
        _add_tpir(result, searches, curves, fpir)
    if len(curves) == len(searches):
        names = [search.gallery for search in searches] if len(searches) > 1 else [""]
        result.curves = dict(zip(names, curves, strict=True))
    ranks = _add_ranks(result, searches)
    mated = len(np.unique(np.concatenate([search.subject_Q[search.mated_Q] for search in searches])))
    replicate = _bootstrap_searches(searches, subjects, ranks, result, draws)
    nonmated = min(len(np.unique(search.subject_Q[~search.mated_Q])) for search in searches)
    result.metric_subjects = {
        name: min(mated, nonmated) if name.startswith("tpir") else mated for name in replicate
    }
    add_replicates(result, replicate)
    return result


def _add_ranks(result: Result, searches: list[Search]) -> tuple[int, ...]:
    """Add the rank-k rates, and return the ranks that have one: none if a gallery has no mate of any probe.

    A rank has none either if a gallery has no more entries: every mate would be among them.
    """
    has_mates, entries = all(search.mated_Q.any() for search in searches), min(s.entries for s in searches)
    measured = tuple(rank for rank in RANKS if has_mates and rank < entries)
    for rank in RANKS:
        name = f"rank{rank}"
        if rank in measured:
            # The mean over the galleries, as the protocol of IJB prescribes, and not over all probes of both.
            hits = [np.mean(search.rank_Q[search.mated_Q] < rank) for search in searches]
            result.metrics[name] = float(np.mean(hits))
        else:
            result.metrics[name] = None
            result.needs[name] = (
                f"needs a gallery of more than {count_text(rank, 'entry', 'entries')}; there are {entries:,}"
                if has_mates
                else _NEEDS_MATES
            )
    return measured


def _add_tpir(result: Result, searches: list[Search], curves: list[Roc], fpir: float) -> None:
    name = f"tpir@{fpir:.0e}"
    measured = [curve for curve in curves if can_measure(curve.impostors, fpir)]
    rates = [value_of(curve, partial(tar_at_far, far=fpir)) for curve in measured]
    result.metrics[name] = float(np.mean(rates)) if len(rates) == len(searches) else None
    if result.metrics[name] is None:
        nonmated = min(int((~search.mated_Q).sum()) for search in searches)
        result.needs[name] = (
            f"needs {least_impostors(fpir):,} probes whose person is not in the gallery; there are {nonmated:,}"
            if all(search.mated_Q.any() for search in searches)
            else _NEEDS_MATES
        )


def _bootstrap_searches(
    searches: list[Search], subjects: int, ranks: tuple[int, ...], result: Result, draws: Draws
) -> dict[str, np.ndarray]:
    measured_fpirs = [fpir for fpir in FPIRS if result.metrics[f"tpir@{fpir:.0e}"] is not None]
    # A search is one comparison of a subject with itself: both sides of the "pair" are the probe's subject.
    curves = [
        bootstrap.WeightedCurve(search.score_Q, search.mated_Q, search.subject_Q, search.subject_Q)
        for search in searches
        if measured_fpirs
    ]

    def metrics(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        rates = [curve.rates(drawn_RS) for curve in curves]
        return _drawn_rank_rates(searches, drawn_RS, ranks) | {
            f"tpir@{fpir:.0e}": np.mean([tar_at_far(*rate, far=fpir) for rate in rates], axis=0)
            for fpir in measured_fpirs
        }

    return bootstrap.replicate(metrics, subjects, draws, pairs=len(searches[0].subject_Q))


def _drawn_rank_rates(
    searches: list[Search], drawn_RS: np.ndarray, ranks: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the rank-k rate in each draw, the mean over the galleries: (R,) by name."""
    drawn, subjects = drawn_RS.astype(np.float64), drawn_RS.shape[1]
    rates: dict[str, list[np.ndarray]] = {f"rank{rank}": [] for rank in ranks}
    for search in searches:
        mated = search.subject_Q[search.mated_Q]
        probes_R = drawn @ np.bincount(mated, minlength=subjects)
        for rank in ranks:
            hit_S = np.bincount(mated, weights=search.rank_Q[search.mated_Q] < rank, minlength=subjects)
            rates[f"rank{rank}"].append(bootstrap.share(drawn @ hit_S, probes_R))
    return {name: np.mean(rate, axis=0) for name, rate in rates.items()}
