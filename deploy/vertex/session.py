"""Provides what every command uses: the clock, and a backend by gcloud or by Google's Python package."""

import dataclasses
import importlib
import json
from collections.abc import Callable

from deploy.vertex import api
from deploy.vertex.api import CustomJob
from deploy.vertex.error_messages import converted_errors
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.rest import REQUEST_TIMEOUT_S, Backend
from deploy.vertex.retry import SYSTEM_CLOCK, Clock
from trainer.base.errors import UserError
from trainer.base.storage.login import credentials

BACKENDS = ("gcloud", "sdk")


class Sdk(Backend):
    """Creates jobs with Google's Python package; the rest goes by REST."""

    def submit(self, request: CustomJob) -> str:
        """Sends one POST, which the client never repeats."""
        try:
            aiplatform = importlib.import_module("google.cloud.aiplatform_v1")
        except ImportError:
            raise UserError(
                "google-cloud-aiplatform is not installed: pip install '.[deploy]', or use gcloud"
            ) from None
        content = {"displayName": request.display_name, "labels": request.labels, "jobSpec": request.spec}
        content |= {"encryptionSpec": {"kmsKeyName": request.kms_key}} if request.kms_key else {}
        with converted_errors():
            endpoint = {"api_endpoint": self._service.removesuffix("/v1")}
            client = aiplatform.JobServiceClient(
                credentials=self._login or credentials(), transport="rest", client_options=endpoint
            )
            job = aiplatform.CustomJob.from_json(json.dumps(content))
            self.sent = True
            created = client.create_custom_job(
                parent=self.parent, custom_job=job, retry=None, timeout=REQUEST_TIMEOUT_S
            )
            return api.created_name(created.name)


@dataclasses.dataclass(frozen=True)
class Session:
    """Holds the clock and the function that opens a backend; tests replace both."""

    clock: Clock
    open: Callable[[str, str, str], Backend]


SESSION = Session(SYSTEM_CLOCK, lambda kind, *place: (Sdk if kind == "sdk" else Gcloud)(*place))
