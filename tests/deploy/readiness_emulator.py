"""Emulates what says whether a project and an account have what jobs need; a test takes something
away."""

import re
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from deploy.platform import readiness
from tests.deploy.emulator import _ROUTES, Emulator, Response

APIS = [*readiness.NEEDED_APIS, *readiness.APIS_OF_IMAGES]
ALL: dict[str, Any] = {
    "apis": APIS,
    "permissions": [*readiness.ROLES],
    "objects": [*readiness.OBJECTS],
    "state": "ACTIVE",
    "bucket": True,
    "quota": [{"effectiveLimit": "-1"}],
}
ACCOUNT = SimpleNamespace(**ALL)
PROJECT = "/projects/[^/:]+"
QUOTAS = rf"/v1beta1{PROJECT}/services/aiplatform.googleapis.com/consumerQuotaMetrics"
L4 = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"


def _services(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    states = {api: "ENABLED" if api in ACCOUNT.apis else "DISABLED" for api in APIS}
    return 200, {
        "services": [
            {"name": f"projects/1/services/{api}", "state": state} for api, state in states.items()
        ]
    }


def _objects(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    return (
        (200, {"permissions": ACCOUNT.objects})
        if ACCOUNT.bucket
        else (404, {"error": {"message": "no bucket"}})
    )


def _quota(metric: str) -> dict[str, Any]:
    return {"metric": metric, "consumerQuotaLimits": [{"quotaBuckets": ACCOUNT.quota}]}


def _quotas(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    """In two pages, as the service may."""
    if "pageToken" not in query:
        return 200, {
            "metrics": [{"metric": "aiplatform.googleapis.com/other"}],
            "nextPageToken": "2",
        }
    return 200, {"metrics": [_quota(L4)]}


_ROUTES |= {
    rf"GET /v1{PROJECT}": lambda *_: (
        200,
        {"projectId": "my-proj", "lifecycleState": ACCOUNT.state},
    ),
    rf"POST /v1{PROJECT}:testIamPermissions": lambda *_: (
        200,
        {"permissions": ACCOUNT.permissions},
    ),
    rf"GET /v1{PROJECT}/services:batchGet": _services,
    r"GET /storage/v1/b/[^/]+/iam/testPermissions": _objects,
    rf"GET {QUOTAS}": _quotas,
    rf"GET {QUOTAS}/([^/]+)": lambda google, match, *_: (200, _quota(unquote(match[1]))),
}
