"""A Redis (or Valkey) over its unix socket: redis-py with hiredis, pipelined SET, MGET and a copy
into the caller's buffer (the client returns ``bytes``)."""

import os
from typing import Any

import numpy as np
import redis
from processes import Processes, wait_for_socket
from workload import Plan, Target, private_buffer, serve


class RedisPeer:
    warm_share = 1.0  # malloc keeps the memory for a few seconds

    def __init__(self) -> None:
        self.processes = Processes()

    def open(self, plan: Plan) -> None:
        path = plan.directory / "redis.sock"
        process = self.processes.start(
            [
                os.environ["REDIS_SERVER"],
                *("--port", "0", "--unixsocket", str(path), "--dir", str(plan.directory)),
                *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
            ],
            log=plan.directory / "redis.log",
        )
        wait_for_socket(path, process)
        self.client = redis.Redis(unix_socket_path=str(path))
        self.client.ping()

    def buffer(self, nbytes: int) -> np.ndarray:
        return private_buffer(nbytes)

    def stage(self, keys: list[bytes], sources: list[np.ndarray]) -> Any:
        return keys, sources

    def put(self, staged: Any) -> int:
        pipeline = self.client.pipeline(transaction=False)
        for key, source in zip(*staged, strict=True):
            pipeline.set(key, source.data)
        return sum(bool(done) for done in pipeline.execute())

    def get(self, keys: list[bytes], into: Target) -> int:
        found = 0
        for value, view in zip(self.client.mget(keys), into.blocks, strict=True):
            if value is not None:
                view[:] = np.frombuffer(value, np.uint8)
                found += 1
        return found

    def warm_done(self) -> None:
        self.client.flushall()

    def close(self) -> None:
        self.processes.close()


if __name__ == "__main__":
    serve(RedisPeer())
