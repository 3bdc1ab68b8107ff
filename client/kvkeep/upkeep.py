"""What is seldom asked of a namespace set: another epoch, hints of what comes, retention pins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.convert import hints_message, milliseconds, pack_keys
from kvkeep.opening import Opening
from kvkeep.results import Pin
from kvkeep.spec import U32_MAX, U64_MAX, check_number, check_seconds, deadline_of, invalid
from kvkeep.v1 import block_cache_pb2 as pb

if TYPE_CHECKING:
    from kvkeep.convert import Keys
    from kvkeep.spec import Hints


class Upkeep(Opening):
    """A part of `Namespace`; any thread may call."""

    def advance_epoch(
        self, expected_epoch: int | None = None, *, timeout_s: float | None = None
    ) -> int:
        """New weights in place: from the answer on nothing is found of what was stored before.

        Goes to the next epoch, if the present one is `expected_epoch` (None = `namespace_epoch`
        of this object); returns the present one. Of several workers that loaded the same weights
        let one call, or all with the same number. Other processes that have this namespace open
        are told at once, and go on in the new epoch by themselves; what they store of the old one
        is refused (REFUSED_EPOCH). Stop storing what was computed with the old weights first: the
        daemon cannot tell. Leases that were given hold. One call, and one to open the new epoch.

        Errors: InvalidArgumentError, NotSupportedError (an epoch that is yet to come),
        UnavailableError (among others: done, but not written down; call again with the same
        `expected_epoch`), DeadlineError, ResourceExhaustedError.
        """
        opened = self._require()
        epoch = opened.namespace_epoch if expected_epoch is None else expected_epoch
        request = pb.AdvanceEpochRequest(
            set_index=opened.set_index,
            expected_epoch=check_number("expected_epoch", epoch, 0, U64_MAX),
        )
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        response = opened.session.transport.advance_epoch(request, deadline_s)
        if response.namespace_epoch > opened.namespace_epoch:
            opened.session.end_epoch(opened.set_index)
        return self._require().namespace_epoch

    def prefetch(
        self,
        keys: Keys,
        *,
        within_s: float = 10.0,
        byte_budget: int | None = None,
        hints: Hints | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Say that `keys`, one chain, will be asked for within `within_s` (at most a minute).

        What of its usable prefix is on nvme only comes into ram, up to `byte_budget` bytes of
        payload, as soon as no read waits for nvme. Nothing is leased, and nothing is promised:
        returns how many keys are to be brought, 0 also where too many hints wait. One call.

        Errors: InvalidArgumentError, UnavailableError, DeadlineError.
        """
        packed = bytes(pack_keys(keys, self.spec.key_nbytes))
        budget = 0 if byte_budget is None else check_number("byte_budget", byte_budget, 0, U64_MAX)
        within_ms = milliseconds(check_seconds("within_s", within_s, zero=False))
        opened = self._require()
        opened.check_count(len(packed) // self.spec.key_nbytes)
        request = pb.PrefetchRequest(
            set_index=opened.set_index,
            keys=packed,
            deadline_ms=within_ms,
            byte_budget=budget,
            hints=hints_message(hints),
        )
        deadline_s = deadline_of(timeout_s, self._timeout_s)
        return opened.session.transport.prefetch(request, deadline_s).planned_blocks

    def pin(self, keys: Keys, *, keep_for_s: int = 0, timeout_s: float | None = None) -> Pin:
        """Keep the longest usable prefix of `keys` for a while, in the tiers where it is.

        All of it or, where that passes the daemon's budget (`pins.max`, of all clients), nothing.
        It holds for `keep_for_s` whole seconds (0 = the daemon's `pins.keep_max`, which is also
        the most), also after this client's end, unless it is taken back by `unpin`. Blocks that
        are removed, damaged or of an epoch that is over leave all the same. One call.

        Errors: InvalidArgumentError, UnavailableError, DeadlineError, ResourceExhaustedError
        (the budget).
        """
        packed = bytes(pack_keys(keys, self.spec.key_nbytes))
        keep_for_s = check_number("keep_for_s", keep_for_s, 0, U32_MAX)
        opened = self._require()
        opened.check_count(len(packed) // self.spec.key_nbytes)
        request = pb.PinRequest(set_index=opened.set_index, keys=packed, keep_for_s=keep_for_s)
        response = opened.session.transport.pin(request, deadline_of(timeout_s, self._timeout_s))
        return Pin(
            response.pin_id,
            response.pinned_blocks,
            response.keep_for_s,
            response.budget_left_nbytes,
        )

    def unpin(self, *pins: Pin, timeout_s: float | None = None) -> int:
        """Take pins back, whichever process got them; how many of them held still. One call.

        Errors: InvalidArgumentError, UnavailableError, DeadlineError.
        """
        for pin in pins:
            if not isinstance(pin, Pin):
                raise invalid("pins", pin, "what pin() returned", "give those")
        request = pb.UnpinRequest(pin_ids=[pin.pin_id for pin in pins if pin.pin_id])
        transport = self._require().session.transport
        return transport.unpin(request, deadline_of(timeout_s, self._timeout_s)).unpinned
