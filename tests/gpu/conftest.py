import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder():
    """The folder of the user: the self-test and the code of kernels would take minutes again for each test."""
