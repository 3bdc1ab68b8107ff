"""How the tables write a key down: one field of a frozen dataclass each."""

import dataclasses
from typing import Any

from kvkeep_server.core.settings_kinds import Kind

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
PAGE_NBYTES = 4 * KiB


def setting(name: str, kind: Kind, default: object, meaning: str) -> Any:  # noqa: ANN401 - a field
    """A field: name in the file, what is allowed, default, meaning."""
    return dataclasses.field(metadata={"facts": (name, kind, default, meaning)})
