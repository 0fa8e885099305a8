import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_training: None) -> None:
    """Import torch once for all runs of these tests; `cold_training` does otherwise."""
