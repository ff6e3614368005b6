"""Looks at what jobs need in Google Cloud: one list of checks, for `doctor` and for what sends
jobs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from urllib.parse import quote

from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.errors import describe_error
from deploy.platform.rest import address, call, pages
from deploy.tiers.gcp_config import GcpConfig, transfer_usd_per_gib
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import Tier
from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage.login import gcloud_account

# What each API is for; docs/permissions.md has the table.
NEEDED_APIS = ("aiplatform.googleapis.com", "storage.googleapis.com", "logging.googleapis.com")
APIS_OF_IMAGES = ("artifactregistry.googleapis.com", "cloudbuild.googleapis.com")
ROLES = {
    "aiplatform.customJobs.create": "roles/aiplatform.user",
    "aiplatform.customJobs.get": "roles/aiplatform.user",
    "aiplatform.customJobs.list": "roles/aiplatform.user",
    "aiplatform.customJobs.cancel": "roles/aiplatform.user",
    "logging.logEntries.list": "roles/logging.viewer",
}
OBJECTS = tuple(f"storage.objects.{action}" for action in ("create", "get", "list", "delete"))


@dataclasses.dataclass(frozen=True)
class Finding:
    """Holds what was found out about a subject; command: what mends it, if something does."""

    subject: str
    state: Literal["good", "bad", "unknown"]
    text: str
    command: str = ""

    def __str__(self) -> str:
        advice = f": `{self.command}`" if self.command else ""
        return f"{self.state:8}{self.subject}: {self.text}{advice}"


def findings(gcp: GcpConfig, tiers: Sequence[Tier]) -> Iterator[Finding]:
    """Yields a finding about each thing that jobs on these tiers need in a project and a region;
    the bucket may be "".
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "project": lambda: _project(gcp),
        "APIs": lambda: _apis(gcp),
        "roles": lambda: _roles(gcp),
        "bucket": lambda: _bucket(gcp),
        "quota": lambda: _quota(tiers, gcp),
    }
    for subject, check in checks.items():
        try:
            yield from check()
        # the interface that would say it is off, or closed to this account
        except ApiError as error:
            yield Finding(subject, "unknown", describe_error(error, gcp))
        except (UserError, PlatformFault) as error:
            yield Finding(subject, "bad", str(error))


def _project(gcp: GcpConfig) -> Iterator[Finding]:
    project = _call("GET", "CLOUDRESOURCEMANAGER", f"v1/projects/{gcp.project}")
    state = project.get("lifecycleState", "ACTIVE")
    yield Finding("project", "good" if state == "ACTIVE" else "bad", f"{gcp.project} is {state}")


def _apis(gcp: GcpConfig) -> Iterator[Finding]:
    """Yields a finding about each API; those for images of one's own may be off."""
    project = gcp.project
    names = [f"projects/{project}/services/{api}" for api in (*NEEDED_APIS, *APIS_OF_IMAGES)]
    listed = _call(
        "GET", "SERVICEUSAGE", f"v1/projects/{project}/services:batchGet", params={"names": names}
    )
    states = {item["name"].rpartition("/")[2]: item["state"] for item in listed.get("services", [])}
    for api in (*NEEDED_APIS, *APIS_OF_IMAGES):
        command = f"gcloud services enable {api} --project={project}"
        if states.get(api) == "ENABLED":
            yield Finding(api, "good", "enabled")
        elif api in NEEDED_APIS:
            yield Finding(api, "bad", "it is off", command)
        else:
            yield Finding(api, "good", "off, and needed for images of your own alone", command)


def _roles(gcp: GcpConfig) -> Iterator[Finding]:
    """Yields a finding about each role of the account, by the permissions that it gives."""
    project = gcp.project
    path = f"v1/projects/{project}:testIamPermissions"
    request = {"permissions": [*ROLES]}
    granted = _call("POST", "CLOUDRESOURCEMANAGER", path, json=request).get("permissions", [])
    for role in dict.fromkeys(ROLES.values()):
        needed = [permission for permission in ROLES if ROLES[permission] == role]
        if missing := [permission for permission in needed if permission not in granted]:
            command = f"gcloud projects add-iam-policy-binding {project} {_member()} --role={role}"
            yield Finding(role, "bad", f"{', '.join(missing)} is not granted", command)
        else:
            yield Finding(role, "good", "its permissions are granted")


def _member() -> str:
    """Returns the flag of gcloud that gives a role to this account."""
    account = gcloud_account() or "YOU@example.com"
    kind = "serviceAccount" if account.endswith(".gserviceaccount.com") else "user"
    return f"--member={kind}:{account}"


def _bucket(gcp: GcpConfig) -> Iterator[Finding]:
    """Yields findings about a bucket: that it exists, where it is, and what this account may do in
    it."""
    if not gcp.bucket:
        yield Finding("bucket", "unknown", "name it by --bucket=gs://NAME")
        return
    region = gcp.region
    name = gcp.bucket.removeprefix("gs://").split("/")[0]
    place = f"{address('STORAGE', 'https://storage.googleapis.com/storage/v1')}/b/{name}"
    try:
        request = {"permissions": OBJECTS}
        granted = call("GET", f"{place}/iam/testPermissions", params=request).get("permissions", [])
    except ApiError as error:
        if error.code != 404:
            raise
        command = (
            f"gcloud storage buckets create gs://{name} --location={region} --project={gcp.project}"
        )
        yield Finding("bucket", "bad", f"gs://{name} does not exist", command)
        return
    if missing := [permission for permission in OBJECTS if permission not in granted]:
        role = "--role=roles/storage.objectUser"
        command = f"gcloud storage buckets add-iam-policy-binding gs://{name} {_member()} {role}"
        yield Finding("bucket", "bad", f"{', '.join(missing)} is not granted", command)
    location = buckets.location(f"gs://{name}")
    price = transfer_usd_per_gib(f"gs://{name}", region, location)
    text = location or "this account may not read it (roles/storage.bucketViewer)"
    if price:
        text += f", so that jobs in {region} pay for what they read"
    yield Finding("bucket's region", "good" if location else "unknown", text)


def _quota(tiers: Sequence[Tier], gcp: GcpConfig) -> Iterator[Finding]:
    """Yields a finding about the quota of each tier, or without tiers of all accelerators in the
    region."""
    region = gcp.region
    project = gcp.project
    path = f"v1beta1/projects/{project}/services/aiplatform.googleapis.com/consumerQuotaMetrics"
    page = f"request more at https://console.cloud.google.com/iam-admin/quotas?project={project}"
    # The limit of each tier against what it needs.
    for tier in tiers:
        subject = f"quota of {tier.name}"
        metric = _metric(tier)
        if tier.resource or not tier.accelerators:
            yield Finding(subject, "good", "it needs none")
        elif metric is None:
            yield Finding(subject, "unknown", "its metric is not known")
        else:
            listed = _call("GET", "SERVICEUSAGE", f"{path}/{quote(metric, safe='')}")
            limit = _limit(listed, region)
            amount = "no limit" if limit < 0 else limit
            text = f"{amount} of {metric} in {region}, and it needs {tier.devices}"
            if 0 <= limit < tier.devices:
                yield Finding(subject, "bad", f"{text}: {page}")
            else:
                yield Finding(subject, "good", text)
    # Without tiers the limits of all accelerators that there are.
    if not tiers:
        listed = pages("metrics", lambda token: _call("GET", "SERVICEUSAGE", path, params=token))
        metrics = {metric["metric"]: metric for metric in listed}
        limits = []
        for name, accelerator in load_machines().accelerators.items():
            if limit := _limit(metrics.get(accelerator.quota_metric or "", {}), region):
                limits.append(f"{name} {limit}")
        if limits:
            yield Finding("quota", "good", f"{', '.join(limits)} in {region}")
        else:
            yield Finding("quota", "bad", f"no accelerator in {region}: {page}")


def _metric(tier: Tier) -> str | None:
    """Returns the quota that a tier's jobs use: SPOT and FLEX_START have one of their own."""
    accelerator = load_machines().accelerators.get(tier.accelerator_type)
    metric = accelerator.quota_metric if accelerator else None
    if metric and tier.strategy in ("SPOT", "FLEX_START"):
        return metric.replace("training_", "training_preemptible_", 1)
    return metric


def _limit(metric: dict[str, Any], region: str) -> int:
    """Returns the limit in a region: that of its own bucket, or else the one of no region in
    particular; -1: none.

    https://docs.cloud.google.com/service-usage/docs/reference/rest/v1beta1/services.consumerQuotaMetrics
    """
    limits = dict[str, int]()
    for quota in metric.get("consumerQuotaLimits", []):
        for bucket in quota.get("quotaBuckets", []):
            place = bucket.get("dimensions", {}).get("region", "")
            limits[place] = int(bucket.get("effectiveLimit", 0))
    return limits.get(region, limits.get("", 0))


def _call(method: str, service: str, path: str, **request: Any) -> Any:
    return call(
        method, f"{address(service, f'https://{service.lower()}.googleapis.com')}/{path}", **request
    )
