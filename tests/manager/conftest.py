"""The fixtures of worlds of ranks."""

from tests.ranks.conftest import server, world2, world4

__all__ = ["server", "world2", "world4"]
