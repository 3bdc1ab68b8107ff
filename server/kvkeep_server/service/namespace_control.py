"""What operators and engines may do to a namespace set while it is served: change its mode."""

from collections.abc import Iterator

from kvkeep_server.core.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from kvkeep_server.core.results import CommitStatus, MissReason, NamespaceMode
from kvkeep_server.service.namespaces import Namespaces, NamespaceSet
from kvkeep_server.service.sessions import Session, Sessions

# An entry is 100 bytes, and only operators make them.
MODES_MAX = 65536
_NORMAL = NamespaceMode.NORMAL
_REFUSED = {
    NamespaceMode.READ_ONLY: CommitStatus.REFUSED_READ_ONLY,
    NamespaceMode.BYPASS: CommitStatus.REFUSED_READ_ONLY,
}


class NamespaceControl:
    """Modes of namespace sets, which hold for all epochs of a set. Event loop only.

    Args:
        namespaces: Which sets there are.
        sessions: Told of changes.
    """

    def __init__(self, *, namespaces: Namespaces, sessions: Sessions) -> None:
        """See the class."""
        self._namespaces = namespaces
        self._sessions = sessions
        # By family, of those that are not normal; it outlives the set.
        self._modes: dict[bytes, NamespaceMode] = {}

    def mode_of(self, namespace_set: NamespaceSet) -> NamespaceMode:
        """What the set serves now."""
        return self._modes.get(namespace_set.family_id, _NORMAL)

    def hides(self, namespace_set: NamespaceSet) -> MissReason | None:
        """Why nothing is found in the set, None = what is there is found."""
        bypassed = self.mode_of(namespace_set) is NamespaceMode.BYPASS
        return MissReason.BYPASSED if bypassed else None

    def refuses(self, namespace_set: NamespaceSet) -> CommitStatus | None:
        """Why nothing may be stored in the set, None = it may."""
        return _REFUSED.get(self.mode_of(namespace_set))

    def count(self) -> dict[NamespaceMode, int]:
        """Sets that are not normal, by mode."""
        modes = list(self._modes.values())
        return {mode: modes.count(mode) for mode in _REFUSED}

    def set_mode(self, set_id: bytes, mode: NamespaceMode) -> NamespaceMode:
        """Changes what a set serves, and tells all who have it open; returns what it was.

        Raises:
            InvalidArgumentError: UNSPECIFIED.
            NotFoundError: No such set is known.
            ResourceExhaustedError: `MODES_MAX` sets are not normal.
        """
        if mode is NamespaceMode.UNSPECIFIED:
            raise InvalidArgumentError("mode", 0, "1 NORMAL, 2 READ_ONLY, 3 BYPASS", "name one")
        family_id = self._family_of(set_id)
        previous = self._modes.pop(family_id, _NORMAL)
        if mode is not _NORMAL:
            if len(self._modes) >= MODES_MAX:
                msg = f"{MODES_MAX} namespace sets are read-only or bypassed; set some to normal"
                raise ResourceExhaustedError(msg, retry_after_s=60.0)
            self._modes[family_id] = mode
        for session, handle in self._who_has(family_id):
            values = {"set_index": handle, "mode": int(mode)}
            self._sessions.tell(session, "namespace_mode_changed", values)
        return previous

    def _family_of(self, set_id: bytes) -> bytes:
        for namespace_set in self._namespaces:
            if namespace_set.set_id == set_id:
                return namespace_set.family_id
        shown = set_id[:16].hex() or "(empty)"
        msg = f"no namespace set {shown} is known; `kvkeep stats --json` lists those that are"
        raise NotFoundError(msg)

    def _who_has(self, family_id: bytes) -> Iterator[tuple[Session, int]]:
        """Sessions, and the handles by which they have sets of the family."""
        for session in self._sessions:
            for handle in sorted(session.opened):
                if self._namespaces.get(handle).namespace_set.family_id == family_id:
                    yield session, handle
