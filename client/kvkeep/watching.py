"""What comes into the tiers of a host and leaves them, as a router hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.results import Change, ChangeKind, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from kvkeep.transport import ChangeStream


class Watch:
    """Made by `Client.watch`: an iterator of `Change`, and a context manager.

    One thread iterates; any may close. It ends with the session: UnavailableError is raised then,
    and one that is made anew is told everything again. When the epoch of a namespace that it
    watches is over, it tells what left and the iteration ends: watch anew to hear of the next.
    """

    def __init__(self, stream: ChangeStream, key_nbytes: Mapping[bytes, int]) -> None:
        """`key_nbytes` are those of each set, by its id."""
        self._stream = stream
        self._key_nbytes = key_nbytes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        message = self._stream.next()
        if message is None:
            raise StopIteration
        size = self._key_nbytes.get(message.set_id, 1)
        packed = message.keys
        return Change(
            message.sequence,
            ChangeKind(message.kind),
            Tier(message.tier),
            message.set_id,
            message.rank,
            message.group,
            tuple(packed[at : at + size] for at in range(0, len(packed), size)),
            message.parent_key or None,
            message.digest,
        )

    def close(self) -> None:
        """End it; who waits for the next change hears of it. Idempotent."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
