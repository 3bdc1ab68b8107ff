"""Mooncake Store's shared-memory client, the nearest thing to a sidecar.

A master, a store process that owns the memory, and this process as "dummy client", whose buffers
lie in a shared-memory pool that both map; RPC for control.
"""

import ctypes
import time
from pathlib import Path
from typing import Any

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore
from processes import Processes, free_port, wait_for_port
from workload import MIB, Plan, Target, serve

ENVIRONMENT = {"MC_STORE_CLIENT_METRIC": "0", "GLOG_minloglevel": "1"}


class MooncakePeer:
    warm_share = 1.25  # nearly all of its segment, which nobody touched before its first use

    def __init__(self) -> None:
        self.processes = Processes()
        self.store = MooncakeDistributedStore()

    def open(self, plan: Plan) -> None:
        programs = Path(mooncake.__file__).parent
        master, client, metrics = free_port(), free_port(), free_port()
        process = self.processes.start(
            [
                str(programs / "mooncake_master"),
                f"--rpc_port={master}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                # Gets that outlast the lease fail: at 100 ms half of the batches of 128 MiB do.
                "--default_kv_lease_ttl=5000",
                "--rpc_thread_num=4",
            ],
            log=plan.directory / "mooncake_master.log",
            environment=ENVIRONMENT,
        )
        wait_for_port(master, process)
        segment = (plan.working_set_nbytes * 4 // 3 + plan.batch_nbytes) // MIB
        process = self.processes.start(
            [
                str(programs / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={client}",
                f"--global_segment_size={segment} MB",
                f"--master_server_address=127.0.0.1:{master}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                "--threads=4",
                "--local_buffer_size=256MB",
            ],
            log=plan.directory / "mooncake_client.log",
            environment=ENVIRONMENT,
        )
        wait_for_port(client, process)
        pool = plan.source_nbytes + plan.batch_nbytes + 128 * MIB
        # The port opens a moment before the store answers.
        deadline = time.monotonic() + 20
        while code := self.store.setup_dummy(pool, 256 * MIB, f"127.0.0.1:{client}"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"setup_dummy answered {code}")
            time.sleep(0.2)

    def buffer(self, nbytes: int) -> np.ndarray:
        address = self.store.alloc_from_mem_pool(nbytes)
        if not address:
            raise MemoryError(f"alloc_from_mem_pool({nbytes})")
        if code := self.store.register_buffer(address, nbytes):
            raise RuntimeError(f"register_buffer answered {code}")
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    def stage(self, keys: list[bytes], sources: list[np.ndarray]) -> Any:
        return [key.decode() for key in keys], sources

    def put(self, staged: Any) -> int:
        keys, sources = staged
        addresses = [source.ctypes.data for source in sources]
        codes = self.store.batch_put_from(keys, addresses, [source.nbytes for source in sources])
        return sum(code == 0 for code in codes)

    def get(self, keys: list[bytes], into: Target) -> int:
        addresses = [view.ctypes.data for view in into.blocks]
        sizes = [view.nbytes for view in into.blocks]
        codes = self.store.batch_get_into([key.decode() for key in keys], addresses, sizes)
        return sum(code == size for code, size in zip(codes, sizes, strict=True))

    def warm_done(self) -> None:
        time.sleep(0.3)  # for puts and leases that settle
        self.store.remove_all(True)  # noqa: FBT003 - "force", positional in the binding
        time.sleep(0.3)

    def close(self) -> None:
        self.processes.close()


if __name__ == "__main__":
    serve(MooncakePeer())
