"""Measurements on a machine that does other things too."""

from collections.abc import Callable

_GOOD = 3
_MOST = 12


def rounds_within(measure: Callable[[], float], bound_s: float) -> list[float]:
    """Rounds until three are within the bound. What others do makes some late; who is late by
    himself is late in all, and fails here."""
    rounds: list[float] = []
    while sum(seconds <= bound_s for seconds in rounds) < _GOOD:
        assert len(rounds) < _MOST, f"not within {bound_s * 1e3:.0f} ms: {rounds}"
        rounds.append(measure())
    return rounds
