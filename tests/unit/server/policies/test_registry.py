"""Names in the configuration."""

from __future__ import annotations

import pytest

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.policies import registry
from kvkeep_server.policies.admission.always import AlwaysAdmission
from kvkeep_server.policies.eviction.lru import LruEviction
from kvkeep_server.policies.prefetch.chain import WholeChain
from kvkeep_server.policies.prefetch.none import NoPrefetch


def test_names_lead_to_classes():
    assert registry.eviction_policy("lru") is LruEviction
    assert registry.admission_policy("always") is AlwaysAdmission
    assert registry.prefetch_policy("none") is NoPrefetch
    assert registry.prefetch_policy("chain") is WholeChain


@pytest.mark.parametrize(
    ("look_up", "name", "words"),
    [
        (registry.eviction_policy, "LRU", ["ram.policy", "'LRU'", 'did you mean "lru"?']),
        (registry.eviction_policy, "lfru", ["'lfru'", 'did you mean "lru"?']),
        (registry.eviction_policy, "", ["''", '"lru"', "take one of the allowed names"]),
        (registry.admission_policy, "allways", ["ram.admission", 'did you mean "always"?']),
        (registry.prefetch_policy, "off", ["nvme.prefetch", "'off'", '"none"']),
    ],
)
def test_unknown_name_says_what_to_do(look_up, name, words):
    with pytest.raises(InvalidArgumentError) as caught:
        look_up(name)
    for word in words:
        assert word in str(caught.value)


def test_error_names_the_key_that_was_read():
    with pytest.raises(InvalidArgumentError, match=r"nvme\.policy") as caught:
        registry.eviction_policy("fifo", field="nvme.policy")
    assert caught.value.field == "nvme.policy"


def test_registry_cannot_be_written():
    with pytest.raises(TypeError):
        registry.EVICTION["mine"] = LruEviction
