"""The contract of `policies.admission.AdmissionPolicy`, for every registered member, and for broken
ones that it must reject."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import StopReason
from kvkeep_server.policies.admission import AdmissionPolicy
from kvkeep_server.policies.admission.always import AlwaysAdmission
from kvkeep_server.policies.registry import ADMISSION

HINTS = [
    Hints(),
    Hints(stop_reason=StopReason.TOOL_USE, output_tokens=2**32 - 1, session_id=b"\xff" * 64),
    Hints(sub_agent=True, engine_hit_tokens=2**64 - 1, return_expected_s=1e-9, ttl_s=4.3e6),
]


def verdicts(policy: AdmissionPolicy, ids: list[int], hints: Hints) -> list[bool]:
    candidates = np.array(ids, np.int64)
    nbytes = np.full(len(ids), 57 * 1024, np.int64)
    for array in (candidates, nbytes):
        array.flags.writeable = False
    answer = policy.admit(candidates, nbytes, hints, 1.0)
    assert answer.dtype == np.bool_, "verdicts are bools"
    assert answer.shape == (len(ids),), "one verdict a candidate"
    return answer.tolist()


def holds_to_the_contract(make: type[AdmissionPolicy]) -> None:
    for hints in HINTS:
        assert verdicts(make(), [], hints) == []
        whole = verdicts(make(), list(range(64)), hints)
        # 70_000: an id far above those seen.
        for ids in ([3], [63, 5, 6], [70_000]):
            alone = verdicts(make(), ids, hints)
            expected = [whole[block] for block in ids if block < 64] or alone
            assert alone == expected, "a verdict that depends on the other candidates"
    repeated = make()
    answers = [verdicts(repeated, [0, 1, 2], Hints()) for _ in range(2)]
    assert answers[0] == answers[1], "a candidate that was remembered"


@pytest.mark.parametrize("name", ADMISSION)
def test_member_keeps_the_contract(name):
    holds_to_the_contract(ADMISSION[name])


def test_always_admits_all():
    assert verdicts(AlwaysAdmission(), [7, 0, 3], Hints()) == [True] * 3


class OneVerdict:
    def admit(self, ids, nbytes, hints, now):
        return np.ones(1, np.bool_)


class Numbers:
    def admit(self, ids, nbytes, hints, now):
        return np.ones(len(ids), np.int64)


class FirstOnly:
    def admit(self, ids, nbytes, hints, now):
        return np.arange(len(ids)) == 0


class SecondTime:
    def __init__(self):
        self._seen = set()

    def admit(self, ids, nbytes, hints, now):
        known = np.array([block in self._seen for block in ids.tolist()], np.bool_)
        self._seen.update(ids.tolist())
        return known


class Overwrites:
    def admit(self, ids, nbytes, hints, now):
        nbytes[:] = 0
        return np.ones(len(ids), np.bool_)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (OneVerdict, "one verdict a candidate"),
        (Numbers, "verdicts are bools"),
        (FirstOnly, "depends on the other candidates"),
        (SecondTime, "was remembered"),
        (Overwrites, "read-only"),
    ],
)
def test_suite_rejects_a_broken_policy(broken, words):
    with pytest.raises((AssertionError, ValueError), match=words):
        holds_to_the_contract(broken)
