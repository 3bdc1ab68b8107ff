"""kvkeep itself: a daemon of its own, blocks filled into the staging ring before the clock runs,
one Commit; reads
through the shared index and the mapped pool into the caller's buffer."""

from typing import Any

import numpy as np
from workload import MIB, Plan, Target, private_buffer, serve

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.cli.bench_load import GrownPool


class KVKeepPeer:
    warm_share = 1.0  # the pool grows, and gets its huge pages

    def open(self, plan: Plan) -> None:
        pool = plan.working_set_nbytes * 5 // 4 + 2 * plan.batch_nbytes
        self.daemon = DaemonProcess(
            plan.directory, {"ram": {"size": f"{pool // MIB}MiB", "chunk": "1GiB"}}
        )
        self.daemon.start()
        # Room for the batches that a round stages before it commits the first of them.
        self.client = kvkeep.connect(str(plan.directory), staging_nbytes=1024 * MIB, timeout_s=30.0)
        self.pool = GrownPool(self.client)
        self.staged_nbytes = 0
        self.warm_keys: list[bytes] | None = []
        self.namespace = self.client.open_namespace(
            kvkeep.NamespaceSpec(
                tenant="bench",
                model="peers",
                weights_fingerprint="none",
                engine="bench",
                layout_version="1",
                kv_dtype="uint8",
                hash_algorithm="bench",
                key_nbytes=32,
                groups=[
                    kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=plan.block_nbytes)
                ],
            )
        )

    def buffer(self, nbytes: int) -> np.ndarray:
        return private_buffer(nbytes)

    def stage(self, keys: list[bytes], sources: list[np.ndarray]) -> Any:
        self.staged_nbytes += sum(source.nbytes for source in sources)
        # The pool grows when less than half a chunk is free; a commit that meets a growth waits for
        # it, which the median of a round does not see.
        self.pool.wait_for(min(self.staged_nbytes, 256 * MIB))
        packed = b"".join(keys)
        if self.warm_keys is not None:
            self.warm_keys.append(packed)
        store = self.namespace.store(packed)
        for view, source in zip(store.views, sources, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), source)
        return store

    def put(self, staged: Any) -> int:
        self.staged_nbytes = 0
        return staged.commit().stored

    def get(self, keys: list[bytes], into: Target) -> int:
        return self.namespace.read_into(b"".join(keys), into.whole)

    def warm_done(self) -> None:
        self.pool.wait_for_huge_pages()
        for packed in self.warm_keys or ():
            self.namespace.remove(packed)
        self.warm_keys = None

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "daemon"):
            self.daemon.stop()


if __name__ == "__main__":
    serve(KVKeepPeer())
