"""How many examples a property is tried with: all of them with ``--hypothesis-profile many``, as in `.ci/run`."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, settings

PROFILES = {"few": 15, "many": 50}
"""The number of examples of a property that names none."""


def examples(number: int, suppressed: Collection[HealthCheck] = ()) -> settings:
    """Return the settings of a property that needs a number of examples of its own; fewer with the profile `few`."""
    share = settings.default.max_examples / PROFILES["many"]
    return settings(max_examples=max(1, round(number * share)), deadline=None, suppress_health_check=list(suppressed))
