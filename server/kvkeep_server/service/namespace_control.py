"""What operators and engines may do to a namespace set while it is served: change its mode, end its
epoch.

A *family* is a namespace set in all of its epochs.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvkeep_server.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    TierUnavailableError,
)
from kvkeep_server.core.results import CommitStatus, MissReason, NamespaceMode
from kvkeep_server.service.namespaces import Namespaces, NamespaceSet
from kvkeep_server.service.sessions import Session, Sessions
from kvkeep_server.tiering.removal import Removal

# An entry is 100 bytes, and only operators make them.
MODES_MAX = 65536
EPOCH_MAX = (1 << 64) - 1
# Between two looks at what commits that were under way brought into an epoch that is over.
_PURGE_AGAIN_S = 0.05
_NORMAL = NamespaceMode.NORMAL
_REFUSED = {
    NamespaceMode.READ_ONLY: CommitStatus.REFUSED_READ_ONLY,
    NamespaceMode.BYPASS: CommitStatus.REFUSED_READ_ONLY,
}


class NamespaceControl:
    """Modes and epochs. Event loop only.

    Args:
        namespaces: Which sets there are.
        sessions: Told of changes.
        removal: Takes out what is of no use any more.
    """

    def __init__(self, *, namespaces: Namespaces, sessions: Sessions, removal: Removal) -> None:
        """See the class."""
        self._namespaces = namespaces
        self._sessions = sessions
        self._removal = removal
        self.epochs = namespaces.epochs
        self._advancing = asyncio.Lock()
        self._advances: set[asyncio.Task[int]] = set()
        # By set id.
        self._purges: dict[bytes, asyncio.Task[None]] = {}
        # By family, of those that are not normal; it outlives the set.
        self._modes: dict[bytes, NamespaceMode] = {}

    def mode_of(self, namespace_set: NamespaceSet) -> NamespaceMode:
        """What the set serves now."""
        return self._modes.get(namespace_set.family_id, _NORMAL)

    def hides(self, namespace_set: NamespaceSet) -> MissReason | None:
        """Why nothing is found in the set, None = what is there is found."""
        if self.is_over(namespace_set):
            return MissReason.NAMESPACE_MISMATCH
        bypassed = self.mode_of(namespace_set) is NamespaceMode.BYPASS
        return MissReason.BYPASSED if bypassed else None

    def refuses(self, namespace_set: NamespaceSet) -> CommitStatus | None:
        """Why nothing may be stored in the set, None = it may."""
        if self.is_over(namespace_set):
            return CommitStatus.REFUSED_EPOCH
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

    # --- epochs

    def is_over(self, namespace_set: NamespaceSet) -> bool:
        """Whether the set's epoch is."""
        return namespace_set.spec.namespace_epoch < self.epochs.of(namespace_set.family_id)

    @contextmanager
    def watched(self, sets: Sequence[NamespaceSet]) -> Iterator[Callable[[], bool]]:
        """Inside, the numbers of these sets' keyspaces stay theirs. Gives what tells whether
        nothing more will happen in one of them."""
        for one in sets:
            one.watchers += 1
        try:
            yield lambda: any(map(self.is_emptied, sets))
        finally:
            for one in sets:
                one.watchers -= 1

    def is_emptied(self, namespace_set: NamespaceSet) -> bool:
        """Whether the set's epoch is over, and all that was there has left."""
        return self.is_over(namespace_set) and namespace_set.set_id not in self._purges

    def serving(self, handles: Collection[int]) -> list[int]:
        """Those whose epoch is not over."""
        sets = ((handle, self._namespaces.get(handle).namespace_set) for handle in handles)
        return [handle for handle, namespace_set in sets if not self.is_over(namespace_set)]

    def advance(self, namespace_set: NamespaceSet, expected: int) -> asyncio.Task[int]:
        """Begins to end a set's epoch; the result is the family's present one.

        Args:
            namespace_set: Of any epoch.
            expected: Goes forward only from this one.

        Raises:
            FailedPreconditionError: `expected` is yet to come, or the last that there can be.
            ResourceExhaustedError: As `Epochs.advance`.
            TierUnavailableError: As `Epochs.advance`.
        """
        task = asyncio.create_task(self._advance(namespace_set, expected))
        self._advances.add(task)
        task.add_done_callback(self._advances.discard)
        return task

    async def _advance(self, namespace_set: NamespaceSet, expected: int) -> int:
        async with self._advancing:
            own, family_id = namespace_set.spec.namespace_epoch, namespace_set.family_id
            before = self.epochs.of(family_id)
            present = max(own, before)
            if expected > present or present == EPOCH_MAX:
                msg = f"expected_epoch is {expected}, the present one {present}; give that"
                raise FailedPreconditionError(msg)
            epoch = present + (expected == present)
            old = [one for one in self._of_family(family_id) if one.spec.namespace_epoch < epoch]
            boundary_ids = [boundary for one in old for boundary in one.siblings]
            try:
                await self.epochs.advance(family_id, epoch, boundary_ids)
            except TierUnavailableError:
                self._ended(family_id, before, epoch)
                raise
            self._ended(family_id, before, epoch)
            return epoch

    def _ended(self, family_id: bytes, before: int, epoch: int) -> None:
        """Tells who has open what is over from now on, and empties it."""
        if before == epoch:
            return
        for session, handle in list(self._who_has(family_id)):
            own = self._namespaces.get(handle).namespace_set.spec.namespace_epoch
            if own < before:
                # It was told when that was over: handles must not add up.
                session.opened.discard(handle)
            elif own < epoch:
                values = {"set_index": handle, "namespace_epoch": epoch}
                self._sessions.tell(session, "namespace_epoch_changed", values)
        for namespace_set in self._of_family(family_id):
            if self.is_over(namespace_set):
                self._begin_purge(namespace_set)

    def _begin_purge(self, namespace_set: NamespaceSet) -> None:
        set_id = namespace_set.set_id
        if set_id not in self._purges:
            task = asyncio.create_task(self._purge(namespace_set))
            self._purges[set_id] = task
            task.add_done_callback(lambda _: self._purges.pop(set_id))

    async def _purge(self, namespace_set: NamespaceSet) -> None:
        """Takes out what is there, and what calls that were under way bring."""
        namespace_set.working += 1
        try:
            while True:
                alone = namespace_set.working == 1
                numbers = {space.index for space in namespace_set.keyspaces.values()}
                removed = await self._removal.of_keyspaces(numbers)
                if alone and not removed:
                    return
                await asyncio.sleep(_PURGE_AGAIN_S)
        finally:
            namespace_set.working -= 1

    async def finish(self) -> None:
        """Leaves what is not emptied yet, and ends what is written down."""
        purges = list(self._purges.values())
        for task in purges:
            task.cancel()
        await asyncio.gather(*purges, *self._advances, return_exceptions=True)

    def _of_family(self, family_id: bytes) -> list[NamespaceSet]:
        return [one for one in self._namespaces if one.family_id == family_id]
