"""What several modules here need."""

import pytest


@pytest.fixture
def compiler() -> None:
    """Skip the test where nothing can be compiled."""
    from parallelize.compile import missing_compiler

    if (missing := missing_compiler()) is not None:
        pytest.skip(missing[0])
