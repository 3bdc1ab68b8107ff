"""Name in the configuration -> class of the policy. A new one is one file, and one line here."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.policies.admission import AdmissionPolicy
from kvkeep_server.policies.admission.always import AlwaysAdmission
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.policies.eviction.lru import LruEviction
from kvkeep_server.policies.prefetch import PrefetchPolicy
from kvkeep_server.policies.prefetch.chain import WholeChain
from kvkeep_server.policies.prefetch.none import NoPrefetch

EVICTION: Final[Mapping[str, type[EvictionPolicy]]] = MappingProxyType({"lru": LruEviction})
ADMISSION: Final[Mapping[str, type[AdmissionPolicy]]] = MappingProxyType(
    {"always": AlwaysAdmission}
)
PREFETCH: Final[Mapping[str, type[PrefetchPolicy]]] = MappingProxyType(
    {"chain": WholeChain, "none": NoPrefetch}
)

_Policy = TypeVar("_Policy")


def eviction_policy(name: str, *, field: str = "ram.policy") -> type[EvictionPolicy]:
    """The eviction policy of this name.

    Args:
        name: As in the configuration.
        field: Key in the configuration, for the error.

    Raises:
        InvalidArgumentError: No such policy.
    """
    return _named(EVICTION, name, field)


def admission_policy(name: str, *, field: str = "ram.admission") -> type[AdmissionPolicy]:
    """The admission policy of this name; arguments and errors as in `eviction_policy`."""
    return _named(ADMISSION, name, field)


def prefetch_policy(name: str, *, field: str = "nvme.prefetch") -> type[PrefetchPolicy]:
    """The prefetch policy of this name; arguments and errors as in `eviction_policy`."""
    return _named(PREFETCH, name, field)


def _named(members: Mapping[str, type[_Policy]], name: str, field: str) -> type[_Policy]:
    found = members.get(name)
    if found is None:
        near = difflib.get_close_matches(name.strip().lower(), members, n=1, cutoff=0.5)
        fix = f'did you mean "{near[0]}"?' if near else "take one of the allowed names"
        allowed = ", ".join(f'"{member}"' for member in sorted(members))
        raise InvalidArgumentError(field=field, value=name, allowed=allowed, fix=fix)
    return found
