"""What the tests of Triton's models share."""

import pytest

from tests.support import pass_over_old_objects


@pytest.fixture(scope="module", autouse=True)
def _pass_over_old_objects() -> None:
    """Make the collection that ends each model quick."""
    pass_over_old_objects()
