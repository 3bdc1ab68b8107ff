"""Batches of chain hashes: packed bytes on the wire, u64 words in numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import InvalidArgumentError

KEY_NBYTES_MIN = 16
KEY_NBYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Keys of one request in chain order.

    Attributes:
        words: Shape (keys, ceil(key_nbytes / 8)), little-endian u64; the last word is filled up
            with zero bytes.
        key_nbytes: Length of one key in bytes, 16 to 64.
    """

    words: NDArray[np.uint64]
    key_nbytes: int

    def __len__(self) -> int:
        """Number of keys."""
        return len(self.words)

    @classmethod
    def unpack(cls, packed: bytes, key_nbytes: int, field: str = "keys") -> "KeyBatch":
        """From the wire form, without a copy where the length allows.

        Raises:
            InvalidArgumentError: `packed` is not a whole number of keys.
        """
        count, rest = divmod(len(packed), key_nbytes)
        if rest:
            raise InvalidArgumentError(
                field,
                f"{len(packed)} bytes",
                f"a multiple of key_nbytes = {key_nbytes}",
                "pack the keys one behind the other, each with the namespace's key_nbytes",
            )
        if key_nbytes % 8 == 0:
            words = np.frombuffer(packed, np.uint64).reshape(count, key_nbytes // 8)
        else:
            padded = np.zeros((count, -(-key_nbytes // 8) * 8), np.uint8)
            padded[:, :key_nbytes] = np.frombuffer(packed, np.uint8).reshape(count, key_nbytes)
            words = padded.view(np.uint64)
        return cls(words, key_nbytes)

    def pack(self) -> bytes:
        """The wire form."""
        nbytes = self.words.shape[1] * 8
        if nbytes == self.key_nbytes:
            return self.words.tobytes()
        raw = np.ascontiguousarray(self.words).view(np.uint8).reshape(len(self), nbytes)
        return raw[:, : self.key_nbytes].tobytes()

    def slice(self, start: int, stop: int) -> "KeyBatch":
        """Keys start to stop (exclusive), sharing memory."""
        return KeyBatch(self.words[start:stop], self.key_nbytes)

    def select(self, positions: NDArray[np.int64]) -> "KeyBatch":
        """The keys at these positions, copied."""
        return KeyBatch(self.words[positions], self.key_nbytes)
