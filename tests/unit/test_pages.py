"""Pages obey their own content security policy: nothing in them needs what the policy blocks."""

import hashlib
import re
from base64 import b64encode

import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure

from facetrain.pages.figures import svg
from facetrain.pages.render import jpeg_image, render
from facetrain.verify.output.formatting import metric_words

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J"


def a_page():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], linestyle="--", label="x", alpha=0.5)
    axes.set_title(HOSTILE.replace("\x1b", ""))
    axes.legend()
    best, rows = ("good", HOSTILE, HOSTILE), [("good", [HOSTILE])]
    values = {"best": best, "header": [HOSTILE], "rows": rows, "curves": [svg(figure, HOSTILE)]}
    return render("run/report/runs.html.j2", title=HOSTILE, **values)


def test_the_policy_allows_the_style_of_the_page_and_nothing_else():
    page = a_page()
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(None, 1) for rule in policy.split("; "))
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**nothing, "img-src": "data:", "style-src": f"'sha256-{digest}'"}
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_nothing_in_a_page_needs_what_the_policy_blocks_and_names_cannot_be_markup():
    page = re.sub("<!--.*?-->", "", a_page(), flags=re.S)
    assert len(re.findall("<style", page)) == 1 and "\x1b" not in page
    assert not re.search(r"<[^>]* (style|on\w+)=", page)
    assert "<script" not in page and "<img" not in page and "javascript:" not in page
    image = str(jpeg_image(b"", HOSTILE))
    assert image.count("<") == 1 and "\x1b" not in image


def test_figures_take_the_colors_of_the_page_and_keep_their_own_as_attributes():
    page = a_page()
    assert 'fill="none"' in page and 'stroke-dasharray="' in page and 'stroke-linejoin="round"' in page
    assert 'stroke-opacity="0.5"' in page and "currentColor" in page and "#ffffff" not in page


def test_the_same_figure_has_the_same_ids_at_any_time_and_others_beside_another_one():
    figure = Figure()
    figure.subplots().plot([0, 1])
    first, again, other = (svg(figure, salt) for salt in ("loss", "loss", "lr"))
    assert first == again and "<dc:date>" not in first
    ids = [set(re.findall(r"url\(#(\w+)\)", drawing)) for drawing in (first, other)]
    assert ids[0] and not ids[0] & ids[1]


def test_a_value_that_a_template_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="rows"):
        render("run/report/runs.html.j2", title="x", best=None, header=[])


def test_metrics_are_named_in_the_words_of_the_field():
    assert metric_words("tar@1e-04") == "TAR at FAR 0.0001"
    assert metric_words("fnmr@1e-06") == "FNMR at FMR 0.000001"
    assert "folds" in metric_words("accuracy_std") and "groups" in metric_words("accuracy_spread")
    assert metric_words("rank5") == "rank-5 identification rate"
    assert metric_words("a_new_metric") == "a new metric"
