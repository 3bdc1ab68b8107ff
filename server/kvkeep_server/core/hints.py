"""What an engine may tell about a request; it feeds the policies and nothing else."""

from dataclasses import dataclass

from kvkeep_server.core.results import StopReason


@dataclass(frozen=True, slots=True)
class Hints:
    """All optional and unverified: a hint may lead a policy astray, and must never break it.

    Attributes:
        stop_reason: Why the output that this request continues, or ends with, stopped.
        output_tokens: Tokens of that output, 0 = unknown.
        sub_agent: The request belongs to an agent that another one started.
        session_id: The engine's name of the conversation, at most 64 bytes, empty = unknown.
        engine_hit_tokens: Leading tokens that the engine's own cache already had.
        return_expected_s: Seconds until the session is expected back, 0 = unknown.
        ttl_s: Seconds after which the blocks are worthless, 0 = the retention class's.
    """

    stop_reason: StopReason = StopReason.UNSPECIFIED
    output_tokens: int = 0
    sub_agent: bool = False
    session_id: bytes = b""
    engine_hit_tokens: int = 0
    return_expected_s: float = 0.0
    ttl_s: float = 0.0
