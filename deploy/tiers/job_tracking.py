"""Prepares a job whose run trackers show: what it installs, its variables, and what it could not reach."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.images import Image
from deploy.tiers.job_checks import check_module
from deploy.tiers.output import say
from deploy.tiers.packages import Package
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.run_files.tracking.sender import TAGS
from trainer.base.run_files.tracking.vertex_runs import TENSORBOARD, VertexApi
from trainer.base.tracker import read_addresses

CREATE = "create"
REQUIREMENTS = {"mlflow": "mlflow-skinny", "wandb": "wandb"}  # as the extras of setup.py
_TOKENS = {"mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"), "wandb": ("WANDB_API_KEY",)}
_HERE = re.compile(r"sqlite:|https?://(localhost|127\.|0\.0\.0\.0|\[::1\])")


def check_trackers(track: str, image: Image, packages: Sequence[Package]) -> None:
    """Raises UserError for a tracker that the job's machines cannot reach, or whose package its image cannot have."""
    for address in read_addresses(track):
        if ":" in address.kind and image.plain:
            check_module("track", address.text, address.kind.partition(":")[0], packages)
        if _HERE.match(address.server):
            raise UserError(
                f"track={address.text} is on this machine, which the job cannot reach: name a server, or send the run "
                f"when it has ended: `python -m deploy track gs://… --track={address.text}`"
            )
        if image.built and address.kind in REQUIREMENTS:
            raise UserError(
                f"track={address.text}: the job's image has no {REQUIREMENTS[address.kind]}: use --image=install, or "
                "an image of yours that has it"
            )


def variables(track: str, tier: Tier, image: str, gcp: GcpConfig, tensorboard: str) -> list[dict[str, str]]:
    """Returns the variables of a job that its trackers read: tags, project and region, the TensorBoard instance."""
    if not track:
        return []
    tags = {"tier": tier.name, "image": image, "strategy": tier.strategy, "usd_per_hour": tier.price_per_hour,
            "project": gcp.project, "region": gcp.region}  # fmt: skip
    tensorboard = "" if tensorboard.endswith(f"/{CREATE}") else tensorboard  # the tracker finds it as well
    variables = {TAGS: json.dumps(tags), "CLOUDSDK_CORE_PROJECT": gcp.project, "CLOUDSDK_AI_REGION": gcp.region}
    return [{"name": name, "value": value} for name, value in {**variables, TENSORBOARD: tensorboard}.items() if value]


def warnings_of_trackers(track: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """Yields a warning for each tracker of whose login the job's spec names nothing."""
    text = json.dumps(spec)
    for address in read_addresses(track):
        names = _TOKENS.get(address.kind, ())
        if names and not any(name in text for name in names):
            secret = f"--secret={names[0]}=projects/P/secrets/S/versions/V"
            yield f"track={address.text}: the job gets no login: add {secret}"


def tensorboard_name(instance: str, spec: Mapping[str, Any], gcp: GcpConfig) -> str:
    """Returns the full name of `--tensorboard_instance`, which may be an id or CREATE. Raises UserError.

    https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/experiments/tensorboard-training
    """
    if "serviceAccount" not in spec:
        raise UserError(
            f"tensorboard_instance={instance}: Vertex AI needs an account that writes to it: add "
            "--service_account=EMAIL, with roles/aiplatform.user and roles/storage.admin (docs/permissions.md)"
        )
    return instance if "/" in instance else f"projects/{gcp.project}/locations/{gcp.region}/tensorboards/{instance}"


def with_tensorboard(spec: Mapping[str, Any], gcp: GcpConfig) -> Mapping[str, Any]:
    """Returns the spec with the instance that CREATE stands for, which is made unless the region has it."""
    if not spec.get("tensorboard", "").endswith(f"/{CREATE}"):
        return spec
    name = VertexApi(gcp.project, gcp.region, f"tensorboard_instance={CREATE}").tensorboard()
    say(f"TensorBoard instance {name}")
    return {**spec, "tensorboard": name}
