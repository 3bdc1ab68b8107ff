"""`kvkeep namespace-mode`: what a daemon serves of a namespace set, changed while it runs."""

import json
from collections.abc import Sequence

import click

from kvkeep.v1.admin_pb2 import NamespaceInfo
from kvkeep.v1.namespace_pb2 import NamespaceMode
from kvkeep_server.cli.admin_calls import AdminCalls
from kvkeep_server.cli.runtime_dir import runtime_dir_option
from kvkeep_server.core.errors import InvalidArgumentError

MODES = ("normal", "read-only", "bypass")
_PREFIX = "NAMESPACE_MODE_"


def mode_name(mode: "NamespaceMode.ValueType") -> str:
    """As on the command line: "read-only"."""
    name: str = NamespaceMode.Name(mode)
    return name.removeprefix(_PREFIX).lower().replace("_", "-")


@click.command("namespace-mode")
@click.argument("mode", type=click.Choice(MODES))
@runtime_dir_option
@click.option("--set", "set_id", metavar="HEX", default="", help="The set whose id begins so.")
@click.option("--tenant", metavar="NAME", help="All sets of this tenant.")
@click.option("--model", metavar="NAME", help="All sets of this model.")
@click.option("--json", "as_machine", is_flag=True, help="Print one JSON object.")
def namespace_mode(
    *,
    mode: str,
    runtime_dir: str,
    set_id: str,
    tenant: str | None,
    model: str | None,
    as_machine: bool,
) -> None:
    """Serve namespace sets normally, read-only, or not at all, until the daemon ends.

    read-only: what is there is found, nothing is stored. bypass: nothing is found either, as if
    there were no cache; what is there stays. `kvkeep stats` shows sets and their modes.
    """
    if not set_id and tenant is None and model is None:
        msg = (
            "which namespace sets is not said: give at least one of --set HEX (the beginning of an"
            " id), --tenant NAME and --model NAME; `kvkeep stats --json` shows them"
        )
        raise click.UsageError(msg)
    with AdminCalls(runtime_dir) as admin:
        chosen = _chosen(admin.namespaces(), set_id.lower(), tenant, model)
        number = NamespaceMode.Value(_PREFIX + mode.upper().replace("-", "_"))
        changed = [
            {
                "set_id": one.set_id.hex(),
                "previous": mode_name(admin.set_namespace_mode(one.set_id, number)),
                "mode": mode,
            }
            for one in chosen
        ]
    if as_machine:
        click.echo(json.dumps({"namespaces": changed}))
        return
    for one in changed:
        same = one["previous"] == mode
        said = f"is {mode} already" if same else f"was {one['previous']}, is {mode}"
        click.echo(f"{one['set_id']} {said}")


def _chosen(
    known: Sequence[NamespaceInfo], set_id: str, tenant: str | None, model: str | None
) -> list[NamespaceInfo]:
    """The sets that all of the options name.

    Raises:
        InvalidArgumentError: None is found, or a shortened id means several.
    """
    found = [
        one
        for one in known
        if one.set_id.hex().startswith(set_id)
        and tenant in (None, one.spec.tenant)
        and model in (None, one.spec.model)
    ]
    if not found:
        asked = ", ".join(filter(None, (set_id, tenant, model)))
        allowed = f"one of the {len(known)} sets that the daemon knows"
        raise InvalidArgumentError("namespace set", asked, allowed, "see `kvkeep stats --json`")
    if set_id and len(found) > 1:
        allowed = f"a beginning that one set has, not {len(found)}"
        raise InvalidArgumentError("--set", set_id, allowed, "give more of its id")
    return found
