"""Draws: how many random examples a test of a property takes, here and in `make soak`."""

from hypothesis import settings

_SOAK = 60  # times as many


def examples(count: int) -> settings:
    """Return settings for `count` examples of a test that is slow, or has to see many."""
    is_soak = settings.get_current_profile_name() == "soak"
    return settings(max_examples=count * _SOAK if is_soak else count)
