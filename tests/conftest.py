"""Fixtures for the whole test session."""

from collections.abc import Iterator

import pytest

from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
