import csv

import numpy as np

from facetrain.embeddings.embedding_files import Embeddings
from facetrain.embeddings.exact_search import search_exactly
from facetrain.verify.output.search_results import SearchResults


def test_a_name_that_begins_a_formula_is_text_in_a_spreadsheet(tmp_path):
    names = ["=1+1", "+a", "-b", "@c", "d=e"]
    faces = Embeddings(np.eye(5, dtype=np.float32), names, np.arange(5))
    SearchResults(search_exactly(faces, faces, 1), faces, faces).write_csv(tmp_path / "found.csv")
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["probe"], row["name"]) for row in rows] == [
        (shown, shown) for shown in ("'=1+1", "'+a", "'-b", "'@c", "d=e")
    ]
