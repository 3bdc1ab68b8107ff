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
