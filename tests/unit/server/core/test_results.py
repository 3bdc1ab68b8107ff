"""Enums: what they have in common. That their numbers are the wire's is tested beside `rpc`."""

from enum import IntEnum

import pytest

from kvkeep_server.core import results

ENUMS = [
    kind
    for kind in vars(results).values()
    if isinstance(kind, type) and issubclass(kind, IntEnum) and kind is not IntEnum
]


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_zero_is_unspecified_and_a_status_fits_one_byte(kind):
    assert kind(0).name == "UNSPECIFIED"
    assert [member.value for member in kind] == list(range(len(kind)))
    assert len(kind) <= 256


def test_refusals_lie_between_no_room_and_failed():
    """What `Commits` counts as refused is that range."""
    refused = {status.name for status in results.CommitStatus if status.name.startswith("REFUSED")}
    first, end = results.CommitStatus.REFUSED_NO_ROOM, results.CommitStatus.FAILED
    assert {results.CommitStatus(n).name for n in range(first, end)} == refused
