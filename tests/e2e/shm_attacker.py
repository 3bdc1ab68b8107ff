"""A client that tries to change sealed memory. Prints {attack: outcome} as JSON.

    python shm_attacker.py FD_SOCKET DAEMON_PID UID GID

An outcome is the errno that refused the attack, or DONE. What that means is for the test to say.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import signal
import socket
import sys

from kvkeep.v1 import session_pb2

PAGE = 4096
KIND = session_pb2.FdKind
MAP_SHARED, PROT_READ, PROT_WRITE = mmap.MAP_SHARED, mmap.PROT_READ, mmap.PROT_WRITE
F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = fcntl.F_SEAL_WRITE, 0x10
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_COLLAPSE, FALLOC_ZERO = 1, 2, 8, 16
MADV_REMOVE = 9
PTRACE_ATTACH = 16
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def checked(result):
    if result in {-1, ctypes.c_void_p(-1).value}:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def attach(path):
    """The socket, which holds the session, and the descriptors by kind."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(10)
    client.connect(path)
    hello = session_pb2.SideHello(client_name="attacker", layout_versions=[2])
    client.send(hello.SerializeToString())
    payload, fds, _, _ = socket.recv_fds(client, 65536, 64)
    packet = session_pb2.SidePacket.FromString(payload)
    assert not packet.error, packet.error
    return client, {KIND.Name(d.kind): fd for d, fd in zip(packet.fds, fds, strict=True)}


def map_shared(fd, prot):
    return checked(libc.mmap(None, PAGE, prot, MAP_SHARED, fd, 0))


def attacks_on_file(fd):
    """Attacks through one descriptor."""
    size = os.fstat(fd).st_size
    return {
        "rw map": lambda: map_shared(fd, PROT_READ | PROT_WRITE),
        "write-only map": lambda: map_shared(fd, PROT_WRITE),
        "mprotect": lambda: checked(
            libc.mprotect(map_shared(fd, PROT_READ), PAGE, PROT_READ | PROT_WRITE)
        ),
        "pwrite": lambda: os.pwrite(fd, b"evil", 0),
        "pwrite behind the end": lambda: os.pwrite(fd, b"evil", size),
        "writev": lambda: os.pwritev(fd, [b"evil"], 0),
        "sendfile": lambda: send_file(fd),
        "splice": lambda: splice(fd),
        "ftruncate to 0": lambda: os.ftruncate(fd, 0),
        "ftruncate larger": lambda: os.ftruncate(fd, size + PAGE),
        "truncate by path": lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
        "punch hole": lambda: falloc(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE),
        "zero range": lambda: falloc(fd, FALLOC_ZERO),
        "collapse range": lambda: falloc(fd, FALLOC_COLLAPSE),
        "fallocate larger": lambda: checked(libc.fallocate(fd, 0, size, PAGE)),
        "madvise remove": lambda: checked(
            libc.madvise(map_shared(fd, PROT_READ), PAGE, MADV_REMOVE)
        ),
        "add seal write": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_WRITE),
        "add any seal": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE),
    }


def falloc(fd, mode):
    checked(libc.fallocate(fd, mode, 0, PAGE))


def send_file(fd):
    with open("/etc/hostname", "rb") as source:
        os.sendfile(fd, source.fileno(), 0, 4)


def splice(fd):
    reader, writer = os.pipe()
    os.write(writer, b"evil")
    try:
        os.splice(reader, fd, 4, offset_dst=0)
    finally:
        os.close(reader)
        os.close(writer)


def attacks_on_process(pid):
    """Attacks past the files: into the daemon itself."""
    return {
        "open mem": lambda: open(f"/proc/{pid}/mem", "r+b"),
        "read mem": lambda: open(f"/proc/{pid}/mem", "rb"),
        "list descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "list maps": lambda: open(f"/proc/{pid}/maps").read(),
        "ptrace": lambda: checked(libc.ptrace(PTRACE_ATTACH, pid, None, None)),
        "process_vm_readv": lambda: move_bytes(libc.process_vm_readv, pid),
        "process_vm_writev": lambda: move_bytes(libc.process_vm_writev, pid),
        "pidfd_getfd": lambda: steal_descriptor(pid),
    }


def move_bytes(call, pid):
    buffer = ctypes.create_string_buffer(b"evil")
    local = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 4)
    remote = (ctypes.c_void_p * 2)(0x400000, 4)
    checked(call(pid, local, 1, remote, 1, 0))


def steal_descriptor(pid):
    pidfd = checked(libc.syscall(SYS_PIDFD_OPEN, pid, 0))
    checked(libc.syscall(SYS_PIDFD_GETFD, pidfd, 0, 0))


def outcome_of(attack):
    try:
        attack()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "DONE"


def digest_of(fd):
    with mmap.mmap(fd, 0, prot=PROT_READ) as view:
        return hashlib.sha256(view).hexdigest()


def attach_beside_leases(path, fds):
    """Attaches while leases are held, which make an open(2) of the file wait."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)

    def lease(fd, kind):
        return outcome_of(lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, kind))

    held = [lease(fd, fcntl.F_WRLCK) for fd in fds]
    client, _ = attach(path)
    client.close()
    for fd in fds:
        lease(fd, fcntl.F_UNLCK)
    return held


def attack_sealed(fd):
    """Everything through the descriptor as it came, and through a writable one if there is one."""
    before = digest_of(fd)
    outcomes = {name: outcome_of(attack) for name, attack in attacks_on_file(fd).items()}
    path = f"/proc/self/fd/{fd}"
    outcomes["reopen"] = outcome_of(lambda: os.open(path, os.O_RDWR))
    outcomes["reopen truncating"] = outcome_of(lambda: os.open(path, os.O_WRONLY | os.O_TRUNC))
    with contextlib.suppress(PermissionError):
        reopened = os.open(path, os.O_RDWR)
        for name, attack in attacks_on_file(reopened).items():
            outcomes[f"reopened: {name}"] = outcome_of(attack)
    outcomes["content"] = "UNCHANGED" if digest_of(fd) == before else "CHANGED"
    return outcomes


def main(path, pid, uid, gid):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    client, fds = attach(path)
    report = {
        "leases": attach_beside_leases(path, [fds["FD_KIND_CHUNK"], fds["FD_KIND_INDEX"]]),
        "chunk": attack_sealed(fds["FD_KIND_CHUNK"]),
        "index": attack_sealed(fds["FD_KIND_INDEX"]),
        "process": {name: outcome_of(act) for name, act in attacks_on_process(pid).items()},
    }
    # staging and touch ring are the client's to write, but neither its size nor its seals are
    for kind in ("STAGING", "TOUCH_RING"):
        report[kind.lower()] = {
            name: outcome_of(attack)
            for name, attack in attacks_on_file(fds[f"FD_KIND_{kind}"]).items()
        }
    client.close()
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
