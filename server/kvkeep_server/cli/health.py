"""`kvkeep health`: for health checks of containers and units."""

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvkeep_server.cli.runtime_dir import given_directory, runtime_dir_or_default
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.daemon import SOCKET_NAME


@click.command()
@click.option(
    "--runtime-dir",
    metavar="DIR",
    default="",
    callback=given_directory,
    help="Directory of the daemon's sockets; none: that of `kvkeep serve`.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 60),
    default=2.0,
    show_default=True,
    help="How long the daemon may take to answer.",
)
def health(runtime_dir: str, timeout_s: float) -> None:
    """Ask the daemon whether it serves; exit code 0 if it does, 1 if not."""
    path = f"{runtime_dir_or_default(runtime_dir)}/{SOCKET_NAME}"
    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            msg = f"no daemon answers at {path} ({error.code().name}); is `kvkeep serve` running?"
            raise FailedPreconditionError(msg) from error
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        msg = f"the daemon at {path} says {word}: it starts or drains"
        raise FailedPreconditionError(msg)
    click.echo(word)
