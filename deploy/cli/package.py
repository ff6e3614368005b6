"""`python -m deploy package --bucket=gs://…`: builds the packages of a job and stores them, each once."""

from collections.abc import Sequence

from deploy.cli.arguments import add_flags, parser
from deploy.cli.target import add_backend
from deploy.spec.gcp_config import GcpConfig, checked_address, needed_project, read_project
from deploy.spec.packages import packages_with
from deploy.vertex.errors import explained
from deploy.vertex.session import SESSION, Session
from deploy.vertex.submission import ship
from trainer.errors import DONE


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Prints the addresses that packageUris takes."""
    own = parser(
        "package", "Builds the trainer, and a package of yours, and stores them in a bucket.", "--bucket=gs://…"
    )
    add_flags(own, "bucket", "package", "project")
    add_backend(own)
    asked = own.parse_args(arguments)
    gcp = GcpConfig(needed_project(read_project(asked.project)), "", checked_address("bucket", asked.bucket))
    packages = packages_with(asked.package)
    with explained(gcp):
        ship(packages, gcp.bucket, session.open(asked.backend, gcp.project, gcp.region), session.clock)
    return DONE
