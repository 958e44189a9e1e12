"""What the tests of several formats take."""

import pytest

from facetrain.data.formats import record_headers, record_index


@pytest.fixture
def in_pieces(monkeypatch):
    """Let a RecordIO file of a few records be read in several pieces, as large files are."""
    monkeypatch.setattr(record_index, "_ROWS_PER_CHUNK", 3)
    monkeypatch.setattr(record_index, "_CHUNK_BYTES", 10)
    monkeypatch.setattr(record_index, "_BOUNDARIES_PER_CHUNK", 2)
    monkeypatch.setattr(record_headers, "_SPAN_BYTES", 2000)
