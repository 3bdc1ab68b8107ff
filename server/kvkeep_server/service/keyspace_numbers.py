"""Gives keyspaces their numbers, and takes them back when nobody can mean them any more.

A number is two bytes in every block's columns, so there are few. Who holds a keyspace across a
pause (a call that runs, recovery) holds its number; `Namespaces.forget` knows when nobody does.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvkeep_server.tiering.keyspaces import KEYSPACES_MAX, Keyspace

Name = tuple[bytes, int]


class KeyspaceNumbers:
    """The keyspaces that have a number, by name. Implements `KeyspaceBook`. Event loop only.

    Args:
        add_keyspace: Told of every keyspace that got a number; see `BlockFinder.add_keyspace`.
        is_over: Whether what was found of a boundary id is of an epoch that is over.
    """

    def __init__(
        self,
        add_keyspace: Callable[[Keyspace], None],
        is_over: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """See the class."""
        self._is_over = is_over
        self._add_keyspace = add_keyspace
        self._by_name: dict[Name, Keyspace] = {}
        self._ever = 0
        self._free: list[int] = []
        # Of keyspaces that lie on nvme and nobody opened yet.
        self._found: dict[Name, Keyspace] = {}
        # Numbers that recovery was told, and will use until it is over.
        self._recovering: set[int] = set()

    def __len__(self) -> int:
        """Numbers in use."""
        return self._ever - len(self._free)

    def by_name(self, namespace_id: bytes, group: int) -> Keyspace | None:
        """The keyspace of this name, opened or found on nvme."""
        return self._by_name.get((namespace_id, group))

    def opened(self, keyspace: Keyspace) -> Keyspace:
        """The keyspace with its number, which is that of what recovery found of it, and its seed.

        There must be room.
        """
        name = (keyspace.namespace_id, keyspace.group)
        found = self._found.pop(name, None)
        if found is None:
            return self._number(keyspace)
        if (found.key_nbytes, found.block_nbytes) != (keyspace.key_nbytes, keyspace.block_nbytes):
            # Its blocks are of no use to anybody; its number is theirs until the end.
            return self._number(keyspace)
        return self._known(replace(keyspace, index=found.index, checksum_seed=found.checksum_seed))

    def _number(self, keyspace: Keyspace) -> Keyspace:
        seed = Keyspace.seed(keyspace.namespace_id, keyspace.group, keyspace.block_nbytes)
        if self._free:
            index = self._free.pop()
        else:
            index, self._ever = self._ever, self._ever + 1
        return self._known(replace(keyspace, index=index, checksum_seed=seed))

    def _known(self, keyspace: Keyspace) -> Keyspace:
        self._add_keyspace(keyspace)
        self._by_name[keyspace.namespace_id, keyspace.group] = keyspace
        return keyspace

    def find_or_adopt(self, found: Keyspace) -> Keyspace | None:
        """The keyspace of this namespace id and group, made if nobody opened it yet; of `found` the
        number, rank and seed do not count. None when it differs from the one that is known, its
        epoch is over, or there are too many. Its number stays as it is until `recovered`."""
        if self._is_over(found.boundary_id):
            return None
        name = (found.namespace_id, found.group)
        known = self._by_name.get(name)
        if known is not None:
            same = (known.key_nbytes, known.block_nbytes) == (found.key_nbytes, found.block_nbytes)
            if not same:
                return None
        elif len(self) >= KEYSPACES_MAX:
            return None
        else:
            known = self._found[name] = self._number(replace(found, rank=-1))
        self._recovering.add(known.index)
        return known

    def recovered(self) -> None:
        """Recovery is over: it uses no number any more."""
        self._recovering.clear()

    def held(self, with_blocks: Iterable[int]) -> set[int]:
        """The numbers that cannot be taken back: of keyspaces with blocks, and recovery's."""
        return self._recovering.union(with_blocks)

    def forget(self, keyspace: Keyspace) -> None:
        """Takes a number back: no block has it, and nobody will ask for it."""
        name = (keyspace.namespace_id, keyspace.group)
        assert self._by_name[name].index == keyspace.index
        del self._by_name[name]
        self._found.pop(name, None)
        self._free.append(keyspace.index)

    def forget_found(self, held: set[int]) -> int:
        """As `forget`, of keyspaces that were found on nvme and never opened, and whose blocks are
        gone; how many."""
        gone = [keyspace for keyspace in self._found.values() if keyspace.index not in held]
        for keyspace in gone:
            self.forget(keyspace)
        return len(gone)
