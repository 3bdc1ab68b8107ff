"""`kvkeep check`: the audit of a daemon that serves, or of what one left on disk."""

import json
from pathlib import Path

import click

from kvkeep.v1 import admin_pb2 as pb
from kvkeep_server.cli import check_offline
from kvkeep_server.cli.admin_calls import AdminCalls
from kvkeep_server.cli.runtime_dir import runtime_dir_option
from kvkeep_server.cli.sizes import size_from
from kvkeep_server.core.quantities import show_size

EXIT_FOUND = 1
_FIELDS = (
    "ok",
    "blocks_checked",
    "blocks_verified",
    "nbytes_verified",
    "blocks_corrupt",
    "blocks_removed",
    "longest_step_us",
)

_CHECKED = """\
checked   {blocks:,} blocks against index, slot and key
          units, parents, accounting, pool, policy and leases"""
_BYTES = """\
bytes     {nbytes} of {verified:,} blocks against their checksums
          {corrupt:,} blocks with wrong bytes, {removed:,} taken out with what follows them"""
_BYTES_NOT_READ = "bytes     not read; --bytes compares every block with its checksum"


@click.command()
@runtime_dir_option
@click.option(
    "--offline",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Check the nvme directories of the settings in FILE instead; no daemon may have them.",
)
@click.option(
    "--bytes", "verify", is_flag=True, help="Also read every block and compare its checksum."
)
@click.option(
    "--rate",
    metavar="SIZE",
    callback=size_from(1),
    default="1GiB",
    show_default=True,
    help="With --bytes: read so many bytes a second at most.",
)
@click.option("--json", "as_machine", is_flag=True, help="Print one JSON object.")
def check(
    *, runtime_dir: str, offline: Path | None, verify: bool, rate: int, as_machine: bool
) -> int:
    """Audit a daemon while it serves: index, accounting, pool, leases, and every byte on request.

    Holds nobody up: blocks are looked at in slices, bytes are read in a thread. A block with wrong
    bytes is taken out, with what follows it. Exit code 1 when anything is wrong.

    With --offline: segments, their tables and records, and what they take. Changes nothing.
    """
    if offline is not None:
        report = check_offline.check_directories(offline, nbytes_per_s=rate if verify else None)
        text = check_offline.as_text(report, verify=verify)
        click.echo(check_offline.as_json(report) if as_machine else text)
        return EXIT_FOUND if report.findings else 0
    with AdminCalls(runtime_dir) as admin:
        request = pb.CheckRequest(verify_checksums=verify, verify_nbytes_per_s=rate)
        answer = admin.check(request)
    click.echo(_as_json(answer) if as_machine else _as_text(answer, verify=verify))
    return 0 if answer.ok else EXIT_FOUND


def _as_json(answer: pb.CheckResponse) -> str:
    values = {name: getattr(answer, name) for name in _FIELDS}
    return json.dumps({**values, "findings": list(answer.findings)})


def _as_text(answer: pb.CheckResponse, *, verify: bool) -> str:
    read = _BYTES.format(
        nbytes=show_size(answer.nbytes_verified),
        verified=answer.blocks_verified,
        corrupt=answer.blocks_corrupt,
        removed=answer.blocks_removed,
    )
    lines = [
        _CHECKED.format(blocks=answer.blocks_checked),
        read if verify else _BYTES_NOT_READ,
        f"loop      held for at most {answer.longest_step_us / 1000:.1f} ms",
        *(f"wrong     {finding}" for finding in answer.findings),
        "ok" if answer.ok else f"{len(answer.findings)} findings",
    ]
    return "\n".join(lines)
