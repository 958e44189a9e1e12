"""Pages obey their own content security policy: nothing in them needs what the policy blocks."""

import hashlib
import re
from base64 import b64encode

from matplotlib.figure import Figure

from facetrain.html_page import data_table, details_table, html_page, svg

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def a_page():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], linestyle="--", label=HOSTILE, alpha=0.5)
    axes.set_title(HOSTILE)
    axes.legend()
    body = [details_table([(HOSTILE, HOSTILE)]), data_table([HOSTILE], [[HOSTILE]]), svg(figure, HOSTILE)]
    return html_page(HOSTILE, body)


def test_the_policy_allows_the_style_of_the_page_and_nothing_else():
    page = a_page()
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(None, 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["style-src"] == f"'sha256-{digest}'"
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_nothing_in_a_page_needs_what_the_policy_blocks():
    page = re.sub("<!--.*?-->", "", a_page(), flags=re.S)
    assert len(re.findall("<style", page)) == 1
    assert not re.search(r"<[^>]* (style|on\w+)=", page)
    assert "<script" not in page and "<img" not in page and "javascript:" not in page


def test_figures_keep_their_colors_as_attributes():
    page = a_page()
    assert 'fill="none"' in page and 'stroke-dasharray="' in page and 'stroke-linejoin="round"' in page
    assert 'stroke-opacity="0.5"' in page or 'opacity="0.5"' in page
