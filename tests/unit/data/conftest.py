import pytest


@pytest.fixture(autouse=True)
def separate_cache_folder(tmp_path_factory, monkeypatch):
    """Keep the catalogs of list files out of the developer's cache folder, ~/.cache/facetrain."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
