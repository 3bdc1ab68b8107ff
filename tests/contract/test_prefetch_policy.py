"""The contract of `policies.prefetch.PrefetchPolicy`, for every registered member, and for broken
ones that it must reject."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import StopReason
from kvkeep_server.policies.prefetch import PrefetchPolicy
from kvkeep_server.policies.prefetch.none import NoPrefetch
from kvkeep_server.policies.registry import PREFETCH

HINTS = [
    Hints(),
    Hints(stop_reason=StopReason.END_TURN, output_tokens=2**32 - 1, session_id=b"\xff" * 64),
    Hints(sub_agent=True, engine_hit_tokens=2**64 - 1, return_expected_s=30.0, ttl_s=1e-9),
]
CHAINS = [[], [5], [9, 2, 7, 4, 70_000, 1, 0]]


def plan(policy: PrefetchPolicy, chain: list[int], matched: int, hints: Hints) -> list[int]:
    ids = np.array(chain, np.int64)
    ids.flags.writeable = False
    answer = policy.plan(ids, matched, hints, 1.0)
    assert answer.dtype == np.int64, "ids are int64"
    planned = answer.tolist()
    rest = chain[matched:]
    assert set(planned) <= set(rest), "a block that needs no promotion"
    assert planned == [block for block in rest if block in planned], "chain order, none twice"
    return planned


def holds_to_the_contract(make: type[PrefetchPolicy]) -> None:
    for hints in HINTS:
        for chain in CHAINS:
            for matched in range(len(chain) + 1):
                plan(make(), chain, matched, hints)


@pytest.mark.parametrize("name", PREFETCH)
def test_member_keeps_the_contract(name):
    holds_to_the_contract(PREFETCH[name])


def test_none_plans_nothing():
    assert plan(NoPrefetch(), [4, 5, 6], 1, Hints()) == []


class RestOfTheChain:
    """Not broken: shows that the suite lets a policy that does something pass."""

    def plan(self, chain, matched, hints, now):
        return chain[matched:].copy()


class WholeChain:
    def plan(self, chain, matched, hints, now):
        return chain.copy()


class TailFirst:
    def plan(self, chain, matched, hints, now):
        return chain[matched:][::-1].copy()


class Twice:
    def plan(self, chain, matched, hints, now):
        return np.repeat(chain[matched:], 2)


class Overwrites:
    def plan(self, chain, matched, hints, now):
        chain[:] = 0
        return chain[matched:]


def test_suite_accepts_a_policy_that_prefetches():
    holds_to_the_contract(RestOfTheChain)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (WholeChain, "needs no promotion"),
        (TailFirst, "chain order"),
        (Twice, "none twice"),
        (Overwrites, "read-only"),
    ],
)
def test_suite_rejects_a_broken_policy(broken, words):
    with pytest.raises((AssertionError, ValueError), match=words):
        holds_to_the_contract(broken)
