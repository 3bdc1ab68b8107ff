"""A tier over directories of the test."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.nvme_tier import IndexOwner, nvme_tier


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def owner():
    return IndexOwner()


@pytest.fixture
def make(tmp_path, threads, owner):
    """Makes a tier over one directory, or as many as it is told."""

    def build(directories=1, **options):
        paths = [tmp_path / str(i) for i in range(directories)]
        return nvme_tier(paths, threads, owner=owner, **options)

    return build
