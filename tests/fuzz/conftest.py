import pytest

from tests.fuzz.watch import Watch


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()
