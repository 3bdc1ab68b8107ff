"""A session of another host without the client library: stubs and what they send, sane or not."""

import queue
import struct
import zlib
from typing import Self

import grpc
import numpy as np

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2, block_cache_pb2_grpc

DEADLINE_S = 20.0
CHUNK_NBYTES = 1 << 20


class RawRemote:
    """Attached to the daemon at an address from `__enter__` to `__exit__`."""

    def __init__(self, address: str, *, staging_nbytes: int = 0) -> None:
        self._address = address
        self._hello = block_cache_pb2.RemoteHello(
            client_name="raw", layout_versions=[2], staging_nbytes=staging_nbytes
        )

    def __enter__(self) -> Self:
        self.channel = grpc.insecure_channel(self._address)
        self.stub = block_cache_pb2_grpc.BlockCacheStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self._beats: queue.SimpleQueue = queue.SimpleQueue()
        self._beats.put(block_cache_pb2.AttachRequest(heartbeat=1, hello=self._hello))
        self.attach = self.stub.Attach(iter(self._beats.get, None))
        self.attached = next(self.attach).attached
        self.metadata = (("kvkeep-session-bin", self.attached.session_token),)
        return self

    def __exit__(self, *_: object) -> None:
        self._beats.put(None)
        self.attach.cancel()
        self.channel.close()

    def call(self, name: str, request, timeout_s: float | None = DEADLINE_S):
        """Requests are sealed, but for streams, which are sent as they are."""
        if hasattr(request, "message_crc32"):
            request = sealed(name, request)
        return getattr(self.stub, name)(request, metadata=self.metadata, timeout=timeout_s)

    def open_namespace(self, block_nbytes: int, model: str = "raw"):
        """One FULL group, one rank."""
        group = block_cache_pb2.GroupSpec(
            name="kv",
            kind=block_cache_pb2.GROUP_KIND_FULL,
            tokens_per_block=16,
            block_nbytes=block_nbytes,
        )
        spec = block_cache_pb2.NamespaceSpec(
            model=model,
            weights_fingerprint="sha256:1",
            engine="test",
            layout_version="1",
            kv_dtype="bfloat16",
            hash_algorithm="sha256",
            key_nbytes=32,
            groups=[group],
        )
        request = block_cache_pb2.OpenNamespaceRequest(spec=spec, layout_version=2)
        return self.call("OpenNamespace", request)

    def header(self, set_index: int, keys: bytes, stride: int):
        """A Commit of all keys, whose blocks lie at multiples of `stride`."""
        offsets = np.arange(len(keys) // 32, dtype=np.uint64) * np.uint64(stride)
        return block_cache_pb2.CommitRequest(
            set_index=set_index,
            keys=keys,
            groups=[block_cache_pb2.StagedGroup(staging_offsets=offsets.tobytes())],
        )

    def write(self, header, payload: bytes):
        """A sane Write."""
        begin = first(header)
        return self.call("Write", iter([begin, *chunks(payload, begin)])).commit

    def lookup(self, set_index: int, keys: bytes) -> int:
        request = block_cache_pb2.LookupRequest(set_index=set_index, keys=keys)
        return self.call("Lookup", request).prefix_blocks

    def acquire(self, set_index: int, keys: bytes):
        request = block_cache_pb2.AcquireRequest(set_index=set_index, keys=keys)
        return self.call("Acquire", request)

    def read(self, lease_id: int, **facts: int):
        """The responses of a Read."""
        request = block_cache_pb2.ReadRequest(lease_id=lease_id, **facts)
        return list(self.call("Read", request))

    def stats(self):
        return self.admin.Stats(
            admin_pb2.StatsRequest(), metadata=self.metadata, timeout=DEADLINE_S
        )


def sealed(name: str, request):
    """A copy of a request with its CRC-32, as another language's client would make it."""
    copy = type(request)()
    copy.CopyFrom(request)
    copy.ClearField("message_crc32")
    copy.message_crc32 = zlib.crc32(name.encode() + copy.SerializeToString())
    return copy


def ended(name: str, payload: bytes) -> bytes:
    """An encoded request with its CRC-32."""
    return payload + struct.pack("<BI", 0x7D, zlib.crc32(name.encode() + payload))


def first(header):
    return sealed("Write", block_cache_pb2.WriteRequest(header=header))


def chunk(offset: int, data: bytes, begin):
    """Of the Write that begins with the message `begin`."""
    crc32 = zlib.crc32(data, begin.message_crc32)
    return block_cache_pb2.WriteRequest(data=data, offset=offset, crc32=crc32)


def chunks(payload: bytes, begin) -> list:
    starts = range(0, len(payload), CHUNK_NBYTES)
    return [chunk(at, payload[at : at + CHUNK_NBYTES], begin) for at in starts]
