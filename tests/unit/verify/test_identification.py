"""Open-set curve and ranks, compared with loops over every probe, entry and threshold."""

import numpy as np
import pytest

from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.identification import Search, identification_result, search
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.formatting import format_evaluation


def small_set(seed, *, probes=40, entries=25, people=12):
    """Embeddings of small whole numbers: many similarities are equal, and to the last bit.

    Some people have no entry, some several; subject −1 is the mate of no probe.
    """
    random = np.random.default_rng(seed)
    probe, entry = (random.integers(-4, 5, (count, 3)).astype(np.float64) for count in (probes, entries))
    return probe, random.integers(0, people, probes), entry, random.integers(-1, people - 4, entries)


def by_loops(probe, sought, entry, owner):
    """Return for every probe its mate's similarity or None, the best other entry's, and the rank of the mate."""
    found = []
    for vector, person in zip(probe, sought, strict=True):
        scores = [float(vector @ other) for other in entry]
        mates = [s for s, subject in zip(scores, owner, strict=True) if subject == person]
        others = [s for s, subject in zip(scores, owner, strict=True) if subject != person]
        mate = max(mates) if mates else None
        found.append((mate, max(others), sum(s >= mate for s in others) if mates else None))
    return found


@pytest.mark.parametrize("at_once", [7, 1 << 24])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_rates_and_every_point_of_the_open_set_curve_equal_counting(seed, at_once, monkeypatch):
    monkeypatch.setattr("facetrain.verify.metrics.identification._MAX_SIMILARITIES", at_once)
    given = small_set(seed)
    found, expected = search(*given), by_loops(*given)
    mates = np.array([mate for mate, _, _ in expected if mate is not None])
    alarms = np.array([other for mate, other, _ in expected if mate is None])
    assert len(mates) > 5 and len(alarms) > 5 and len(np.unique(mates)) < len(mates), "there are ties"
    assert found.mated_Q.tolist() == [mate is not None for mate, _, _ in expected]
    curve = found.curve
    assert curve.impostors == len(alarms)
    thresholds = np.unique([*mates, *alarms])[::-1]
    np.testing.assert_array_equal(curve.threshold[1:], thresholds)
    np.testing.assert_allclose(curve.far[1:], [np.mean(alarms >= t) for t in thresholds])
    np.testing.assert_allclose(curve.tar[1:], [np.mean(mates >= t) for t in thresholds])
    metrics = identification_result([found], subjects=12, draws=Draws(0)).metrics
    ranks = np.array([rank for _, _, rank in expected if rank is not None])
    for rank in (1, 5, 10, 20):
        assert metrics[f"rank{rank}"] == pytest.approx(np.mean(ranks < rank))
    allowed = [t for t in [*thresholds, np.inf] if np.mean(alarms >= t) <= 0.1]
    tpir = None if len(alarms) < 10 else pytest.approx(np.mean(mates >= min(allowed)))
    assert metrics["tpir@1e-01"] == tpir


@pytest.mark.parametrize(
    ("probes", "subjects", "entries", "message"),
    [
        (np.zeros((0, 2)), [], np.eye(2), r"probes: embeddings of shape \(0, 2\)"),
        (np.eye(2), [0, 1], np.zeros((0, 2)), "gallery: .* at least one"),
        (np.eye(2), [0], np.eye(2), r"probes: .* subjects of shape \(1,\)"),
        (np.eye(2)[:, :1], [0, 1], np.eye(2), "probes of 1 and a gallery of 2 numbers"),
        (np.array([[np.nan, 0], [0, 1]]), [0, 1], np.eye(2), "probes: .* not finite"),
        (np.eye(2), [0, 1], np.array([[1, 0], [0, np.inf]]), "gallery: .* not finite"),
        (np.eye(2), [0, -1], np.eye(2), "probes: a subject is negative"),
    ],
)
def test_a_search_without_a_result_is_refused(probes, subjects, entries, message):
    with pytest.raises(ValueError, match=message):
        search(probes, np.array(subjects), entries, np.arange(len(entries)))


def test_the_intervals_of_ranks_rest_on_the_people_with_a_mate():
    people, enrolled = 40, 10
    unit = np.eye(people)
    searched = search(unit, np.arange(people), unit[:enrolled], np.arange(enrolled))
    result = identification_result([searched], subjects=people, draws=Draws(50))
    assert result.metrics["rank1"] == 1 and result.subjects == people
    limit = 0.025 ** (1 / enrolled)
    assert result.interval["rank1"] == pytest.approx((limit, 1))
    assert result.interval["tpir@1e-01"] == pytest.approx((limit, 1))


@pytest.mark.parametrize("enrolled", [[20], [0, 20]])
def test_a_gallery_without_the_mate_of_any_probe_has_no_rates(enrolled):
    unit, probe = np.eye(30), np.arange(20)
    galleries = [np.arange(first, first + 10) for first in enrolled]
    searches = [search(unit[probe], probe, unit[gallery], gallery) for gallery in galleries]
    found = identification_result(searches, subjects=20, draws=Draws(20))
    reason = "needs probes whose person is in the gallery; there are none"
    rates = ("tpir@1e-01", "tpir@1e-02", "rank1", "rank5", "rank10", "rank20")
    assert found.needs == dict.fromkeys(rates, reason) and not found.interval and found.curve is None
    assert all(found.metrics[name] is None for name in rates)


def test_a_rank_that_every_mate_has_is_no_result():
    unit = np.eye(40)
    searches = [search(unit, np.arange(40), unit[:entries], np.arange(entries)) for entries in (11, 10)]
    found = identification_result(searches, subjects=40, draws=Draws(20))
    assert found.metrics["entries"] == 10.5 and found.metrics["rank5"] == 1
    assert found.metrics["rank10"] is found.metrics["rank20"] is None and "rank10" not in found.interval
    assert found.needs["rank10"] == "needs a gallery of more than 10 entries; there are 10"
    shown = "\n".join(format_evaluation(ModelResults("", {"x": found}, {}, True)))
    assert "there are 10; also left out: rank20\n" in shown


def test_a_rank_rate_is_the_mean_over_the_galleries_and_not_over_all_their_probes():
    def gallery(*ranks):
        count = len(ranks)
        return Search(
            np.arange(count), np.ones(count, bool), np.array(ranks), np.ones(count), np.zeros(count), 100
        )

    found = identification_result([gallery(0, 0, 0, 1), gallery(3)], subjects=5, draws=Draws(0))
    assert found.metrics["rank1"] == 0.75 / 2 and found.metrics["rank5"] == 1


def test_draws_without_a_nonmated_probe_do_not_count_for_the_rates_of_an_open_set():
    # Ten probes of one person without a mate, whom about a third of the draws lack; one mate in five is found.
    subject = np.append(np.arange(50), np.full(10, 50))
    mated = subject < 50
    mate = np.where(mated, np.where(subject % 5 == 0, 0.9, 0.1), -np.inf)
    other = np.where(mated, 0.0, 0.5)
    one = Search(subject, mated, np.zeros(60, int), mate, other, 100)
    result = identification_result([one], subjects=51)
    assert result.metrics["tpir@1e-01"] == pytest.approx(0.2)
    drawn = result.replicates["tpir@1e-01"]
    assert 0.3 < np.isnan(drawn).mean() < 0.45
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    assert 0.05 < low < 0.2 < high < 0.35


@pytest.mark.parametrize("strangers", [2, 30])
def test_the_interval_of_a_tpir_rests_on_the_people_without_a_mate_if_they_are_fewer(strangers):
    people, enrolled = 40, 40 - strangers
    probe = np.append(np.arange(enrolled), np.arange(enrolled, people).repeat(60 // strangers))
    unit = np.eye(people)
    searched = search(unit[probe], probe, unit[:enrolled], np.arange(enrolled))
    result = identification_result([searched], subjects=people, draws=Draws(50))
    assert result.subjects_of("rank1") == enrolled and "rank1" in result.interval
    assert result.subjects_of("tpir@1e-01") == min(strangers, enrolled)
    assert ("tpir@1e-01" in result.interval) == (strangers > 2)


def test_the_gallery_with_the_fewest_nonmated_probes_decides_what_a_search_can_show():
    def gallery(nonmated, alarms):
        mated = np.arange(nonmated + 20) < 20
        other = np.where(np.arange(nonmated + 20) < 20 + alarms, 0.5, 0.0)
        mate = np.where(mated, 0.4, -np.inf)
        ranks = np.zeros(len(mated), int)
        return Search(np.arange(nonmated + 20), mated, ranks, mate, other, 100, f"of {nonmated}")

    large, small = gallery(5000, 40), gallery(120, 1)
    for searches in ([large, small], [small, large]):
        result = identification_result(searches, subjects=5020, draws=Draws(0))
        assert result.fewest_impostors == 120 and result.lowest_rates["lowest"] == 1 / 120
        assert result.remark("tpir@1e-02") == "uncertain: rests on 1 false accept, fewer than 30"
    assert not identification_result([large], subjects=5020, draws=Draws(0)).remark("tpir@1e-02")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rates_draws_and_counts_of_two_galleries_are_means_and_rest_on_the_fewer_people(order):
    def gallery(mates, strangers, is_found):
        mated = np.arange(mates + strangers) < mates
        mate = np.where(mated, 0.9 if is_found else 0.1, -np.inf)
        rank = np.full(len(mated), 0 if is_found else 5)
        return Search(np.arange(len(mated)), mated, rank, mate, np.where(mated, 0.0, 0.5), 100)

    galleries = gallery(40, 20, True), gallery(30, 12, False)
    result = identification_result([galleries[each] for each in order], subjects=60, draws=Draws(50))
    for name, rate in {"rank1": 0.5, "rank5": 0.5, "rank10": 1.0, "tpir@1e-01": 0.5}.items():
        assert result.metrics[name] == rate and set(result.replicates[name]) == {rate}
    assert result.metrics["mated"] == 35
    assert (result.subjects_of("rank1"), result.subjects_of("tpir@1e-01")) == (40, 12)
    assert result.needs["tpir@1e-02"].endswith("there are 12")
