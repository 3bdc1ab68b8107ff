"""What end-to-end tests share."""

import pytest


@pytest.fixture(params=["local", "remote"])
def way(request: pytest.FixtureRequest) -> str:
    """How a client reaches the daemon: see `tests.fakes.ways`, and `test_both_ways` for who asks
    for it."""
    return request.param
