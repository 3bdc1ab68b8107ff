"""The client program of the test of floods: it sends what costs the daemon most, as fast as it
goes, until it is killed."""

import itertools
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from tests.fakes.client_process import Wire
from tests.fakes.frames import CALLS, HEADER
from tests.fakes.raw_session import PAGE, RawSession

METHODS = {name: method for method, (name, _) in CALLS.items()}
CHAIN = 17
HALVES = 64
HALF_NBYTES = 1 << 20
# gRPC takes no more than 4 MiB.
NBYTES = (4 << 20) - 4096
# Calls on gRPC that wait for their answers. gRPC copies what it received in the loop, 2 ms for each
# of these before we see it: no bound of ours helps against very many.
AT_ONCE = 4


def chain(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(1, count + 1)]


def payload_of(flood: str, set_index: int) -> tuple[str, bytes]:
    """(name of the call, its payload)."""
    # Of two bytes each.
    group = pb.NamespaceSpec(groups=[pb.GroupSpec()]).SerializeToString()
    staged = pb.CommitRequest(groups=[pb.StagedGroup()]).SerializeToString()
    many = NBYTES // 2
    requests = {
        "groups of a namespace": lambda: pb.OpenNamespaceRequest(
            spec=pb.NamespaceSpec.FromString(group * (many - 8))
        ),
        "groups of a commit": lambda: pb.CommitRequest.FromString(staged * many),
        "leases to renew": lambda: pb.RenewRequest(lease_ids=[1] * (NBYTES - 8)),
        "a few keys to remove that are kept": lambda: pb.RemoveRequest(
            set_index=set_index, keys=b"".join(chain(CHAIN)[:-1])
        ),
    }
    request = requests[flood]()
    return type(request).__name__.removesuffix("Request"), request.SerializeToString()


def stored_chain(raw: RawSession) -> int:
    """A set in which the chain lies; its handle."""
    opened = raw.open_namespace(1)
    keys = b"".join(chain(CHAIN))
    assert not raw.commit(opened.set_index, keys, [0] * CHAIN).refused
    return opened.set_index


def flood_frames(raw: RawSession, name: str, payload: bytes) -> None:
    def drain() -> None:
        while raw.calls.recv(1 << 16):
            pass

    threading.Thread(target=drain, daemon=True).start()
    raw.calls.settimeout(None)
    for number in itertools.count():
        header = HEADER.pack(len(payload), METHODS[name], 0, 0, number % (1 << 32))
        raw.calls.sendall(header)
        raw.calls.sendall(payload)


def flood_grpc(raw: RawSession, name: str, payload: bytes) -> None:
    send = raw.channel.unary_unary(f"/kvkeep.v1.BlockCache/{name}")
    room = threading.Semaphore(AT_ONCE)
    metadata = (("kvkeep-session-bin", raw.token),)
    while True:
        room.acquire()
        send.future(payload, metadata=metadata).add_done_callback(lambda _: room.release())


def flood_hellos(runtime_dir: Path) -> None:
    """Says hello and hangs up."""
    hello = session_pb2.SideHello(
        client_name="flood", layout_versions=[2], staging_nbytes=PAGE
    ).SerializeToString()
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, suppress(OSError):
            sock.connect(str(runtime_dir / "kvkeep.fd.sock"))
            sock.send(hello)


def flood_halves(wire: Wire, runtime_dir: Path) -> None:
    """Sessions that each leave a call of HALF_NBYTES half sent, and the next one when it is
    refused: together more than the daemon has room for."""
    payload = pb.LookupRequest(keys=bytes(HALF_NBYTES)).SerializeToString()
    half = HEADER.pack(len(payload), METHODS["Lookup"], 0, 0, 1) + payload[:-1]

    def keep_half(raw: RawSession) -> None:
        raw.calls.settimeout(None)
        rest = b""
        while True:
            raw.calls.sendall(rest + half)
            raw.calls.recv(1 << 16)
            rest = payload[-1:]

    with ExitStack() as held:
        raws = [held.enter_context(RawSession(runtime_dir)) for _ in range(HALVES)]
        threads = [threading.Thread(target=keep_half, args=(raw,), daemon=True) for raw in raws]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        wire.tell("it runs")
        threads[0].join()


def flood(wire: Wire, runtime_dir: Path, what: str, transport: str) -> None:
    """Tells when it runs; never returns."""
    if what == "half calls":
        flood_halves(wire, runtime_dir)
    if what == "hellos":
        wire.tell("it runs")
        flood_hellos(runtime_dir)
    with RawSession(runtime_dir) as raw:
        name, payload = payload_of(what, stored_chain(raw))
        wire.tell("it runs")
        (flood_grpc if transport == "gRPC" else flood_frames)(raw, name, payload)
