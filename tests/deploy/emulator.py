"""Emulates the parts of Vertex AI, Cloud Logging and Cloud Storage that gcloud and Google's clients
use, with faults.

Jobs are parsed as the SDK's CustomJob, which takes enums by name (gcloud) and by number (the SDK)
and rejects unknown fields. `run`, if given, simulates a submitted job in a separate thread.
"""

import base64
import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from google.cloud.aiplatform_v1.types import CustomJob
from google.protobuf.json_format import MessageToDict, ParseError

from tests.deploy import emulated_storage as storage
from tests.deploy.emulated_storage import Match, Query, Response, error, now
from tests.fixtures import Json

PARENT = "/v1/projects/my-proj/locations/us-central1"
POSTS = "POST /v1/projects/my-proj/locations/[^/]+/customJobs$"
QUOTA = (
    "The following quota metrics exceed quota limits:"
    " aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"
)
RATE = (  # Google's message, with 429, for too many calls; no machine quota is exhausted
    "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of"
    " service 'logging.googleapis.com' for consumer 'project_number:123456'."
)


@dataclasses.dataclass
class Fault:
    """Makes the next `times` matching requests fail.

    `kind`: an HTTP status, a "cut" connection, a "slow" response, or one with status 200 that is
        "html" or "empty". `after`: the request is carried out, and only its response is lost;
        `action`: what happens then.
    """

    match: str
    kind: int | str
    times: int = 1
    after: bool = False
    message: str = "injected"
    action: Callable[[], None] = lambda: None
    seconds: float = 0.5  # of a slow response
    triggered: bool = dataclasses.field(default=False, init=False)


class Emulator:
    """Serves `with Emulator() as google:`; `google.url` is its address, `google.requests` its log
    ("METHOD /path").

    The block ends with an AssertionError if a fault was never triggered, or if the emulator itself
    failed, which its client takes for a fault of Google's.
    """

    def __init__(self, run: Callable[["Emulator", Json], None] | None = None) -> None:
        self.run: Any = run
        self.jobs: dict[str, Json] = {}
        self.tuning_jobs: list[Json] = []  # of us-east4
        self.logs: list[Json] = []
        self.models: list[Json] = []  # versions of the registry
        self.skus: dict[str, list[Json]] = {}  # of the Billing Catalog, by service
        self.images: list[Json] = []  # of the repository of Artifact Registry
        self.builds: list[Json] = []  # of Cloud Build
        self.billed: list[list[str]] = []  # rows of the billing export
        self.queries: list[Json] = []  # of the export
        self.resources: dict[str, Json] = {}  # of metadata stores and TensorBoards
        self.points: dict[str, list[Json]] = {}  # of time series
        self.objects: dict[str, bytes] = {}
        self.generations: dict[str, int] = {}  # of replaced objects; 1 for the others
        # times at which an object was stored and touched; others: long ago
        self.updated: dict[str, list[str]] = {}
        self.secrets: dict[str, bytes] = {}  # by the names of their versions
        self.bucket_location = "US-CENTRAL1"
        # of valid tokens; None: nobody has to be logged in
        self.accounts: dict[str, str] | None = None
        self.issued = 0  # number of tokens
        self.expires_at = ""  # the next request that matches finds its token expired
        self.before_request: Callable[[], None] = lambda: None
        self.lists_nothing = 0  # number of list requests that return no jobs yet
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.bodies: list[Json] = []  # of the requests that created jobs
        self.errors: list[str] = []  # of the emulator itself
        self.lock = threading.RLock()
        self.threads: list[threading.Thread] = []
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"google": self})
        )
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, token: Path) -> dict[str, str]:
        """Returns the variables that direct gcloud and Google's clients here. `token`: a file with
        any text."""
        return {
            **{
                f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{self.url}/"
                for name in ("AIPLATFORM", "LOGGING", "CLOUDRESOURCEMANAGER", "SERVICEUSAGE")
            },
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_ARTIFACTREGISTRY": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBUILD": f"{self.url}/build/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_DOCKERHUB": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{self.url}/storage/v1/",
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(token),
            "CLOUDSDK_CORE_PROJECT": "my-proj",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
            "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "0",
            # otherwise a new configuration searches for a metadata server
            "CLOUDSDK_METRICS_ENVIRONMENT": "ci",
            "STORAGE_EMULATOR_HOST": self.url,
            "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true",
        }

    def __enter__(self) -> "Emulator":
        self.serving = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self.serving.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for thread in self.threads:
            thread.join(timeout=120)
        self.errors += [f"{thread.name} still runs" for thread in self.threads if thread.is_alive()]
        self.server.shutdown()
        self.serving.join()
        self.server.server_close()
        if kind is None:
            unused = [fault for fault in self.faults if not fault.triggered]
            assert not self.errors, self.errors
            assert not unused, f"never triggered: {unused}"

    @property
    def job(self) -> Json:
        """Returns the only job."""
        (job,) = self.jobs.values()
        return job

    def create(self, parent: str, content: Json) -> Json:
        """Creates a PENDING job, and starts `run` for it."""
        with self.lock:
            job = MessageToDict(CustomJob.pb(CustomJob.from_json(json.dumps(content))))
            number = str(1000 + len(self.jobs))
            name = f"projects/123456/locations/{parent.rsplit('/', 1)[-1]}/customJobs/{number}"
            job |= {"name": name, "state": "JOB_STATE_PENDING", "createTime": now()}
            self.jobs[number] = job
        if self.run:
            run = self.recorded(job["name"])(self.run)
            thread = threading.Thread(target=run, args=(self, job), name=job["name"], daemon=True)
            self.threads.append(thread)
            thread.start()
        return job

    @contextmanager
    def recorded(self, source: str) -> Iterator[None]:
        """Stores an exception of the block in `errors` and suppresses it."""
        try:
            yield
        except Exception as error:
            self.errors.append(f"{source}: {error!r}")

    def begin(self, job: Json) -> None:
        """Sets the job to RUNNING."""
        with self.lock:
            job |= {"state": "JOB_STATE_RUNNING", "startTime": now()}

    def end(self, job: Json, state: str, error: str = "") -> None:
        """Sets the job to a final state, unless it was cancelled."""
        with self.lock:
            if "CANCEL" not in job["state"] or state == "CANCELLED":
                job |= {"state": f"JOB_STATE_{state}", "endTime": now()}
                if error:
                    job["error"] = {"code": 3, "message": error}

    def log(self, job: Json, text: str, worker: str = "workerpool0-0", time: str = "") -> None:
        """Adds one log entry, as for a worker's line of JSON."""
        with self.lock:
            self.logs.append(
                {
                    "insertId": f"entry{len(self.logs):06}",
                    "timestamp": time or now(),
                    "severity": "INFO",
                    "resource": {
                        "type": "ml_job",
                        "labels": {"job_id": job["name"].rsplit("/", 1)[-1], "task_name": worker},
                    },
                    "jsonPayload": {"message": text},
                }
            )

    def loses_a_job(self) -> None:
        """Loses the answer to the next job, which is not listed either."""
        self.faults = [Fault(POSTS, 503, after=True)]
        self.lists_nothing = 10**6

    def take_fault(self, request: str) -> Fault | None:
        """Returns the fault that this request triggers."""
        with self.lock:
            fault = next(
                (each for each in self.faults if each.times > 0 and re.search(each.match, request)),
                None,
            )
            if fault:
                fault.times -= 1
                fault.triggered = True
            return fault

    def issue(self, account: str) -> Json:
        """Returns a new token that gcloud and Google's clients take for one that ends soon, so they
        keep none."""
        with self.lock:
            self.issued += 1
            token = f"secret-{self.issued}"
            self.accounts = {**(self.accounts or {}), token: account}
        return {
            "access_token": token,
            "accessToken": token,
            "token_type": "Bearer",
            "expires_in": 60,
            "expireTime": "2020-01-01T00:00:00Z",
        }

    def account(self, request: str, authorization: str) -> str | None:
        """Returns the account of a request; None if its token is not valid."""
        if self.accounts is None or "/token" in request:
            return ""
        if self.expires_at and re.search(self.expires_at, request):
            self.accounts = {}
            self.expires_at = ""
        return self.accounts.get(authorization.removeprefix("Bearer "))


def ends(state: str, error: str = "") -> Callable[[Emulator, Json], None]:
    """Returns a job that runs at once to its end."""

    def run(google: Emulator, job: Json) -> None:
        google.begin(job)
        google.end(job, state, error)

    return run


class _Handler(BaseHTTPRequestHandler):
    google: Emulator
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms a request otherwise: head and body are sent apart

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {urlsplit(self.path).path}"
        with self.google.recorded(f"before {request}"):
            self.google.before_request()
        self.google.requests.append(request)
        fault = self.google.take_fault(request)
        if fault and fault.kind == "slow":
            time.sleep(fault.seconds)
            fault = None
        response: Response = 500, error(500, "the emulator failed")
        if not fault or fault.after:
            with self.google.recorded(request):
                response = self.respond(request, body)
        if fault:
            fault.action()
            if fault.kind == "cut":
                self.close_connection = True
                self.connection.close()
                return
            answers: dict[int | str, Response] = {
                "html": (200, b"<html><body>no JSON</body></html>"),
                "empty": (200, {}),
            }
            response = answers.get(fault.kind) or (
                int(fault.kind),
                error(int(fault.kind), fault.message),
            )
        # Sends a JSON object, indented as Google's servers do, or the content of an object.
        status, answer = response
        content = answer if isinstance(answer, bytes) else json.dumps(answer, indent=1).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/html" if isinstance(answer, bytes) else "application/json"
        )
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

    def respond(self, request: str, body: bytes) -> "Response":
        if self.google.account(request, self.headers.get("Authorization", "")) is None:
            return 401, error(401, "Request had invalid authentication credentials.")
        query = {
            key: ",".join(values) for key, values in parse_qs(urlsplit(self.path).query).items()
        }
        for pattern, method in _ROUTES.items():
            if match := re.fullmatch(pattern, request):
                try:
                    return method(self.google, match, query, body)
                except ParseError as wrong:
                    return 400, error(400, str(wrong))
        return 404, error(404, f"unknown address in the emulator: {request}")


# What the reference calls required:
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest/v1/CustomJobSpec
_REQUIRED = {
    "customJob": ("displayName", "jobSpec"),
    "jobSpec": ("workerPoolSpecs",),
    "workerPoolSpecs": ("machineSpec",),
    "pythonPackageSpec": ("executorImageUri", "packageUris", "pythonModule"),
    "containerSpec": ("imageUri",),
    "env": ("name", "value"),
    "baseOutputDirectory": ("outputUriPrefix",),
}


def _missing(content: Any, name: str = "customJob") -> Iterator[str]:
    """Yields the required fields that a message, or one below it, has not."""
    if isinstance(content, dict):
        yield from (
            f"{name}.{field}" for field in _REQUIRED.get(name, ()) if not content.get(field)
        )
        for field, value in content.items():
            yield from _missing(value, field)
    elif isinstance(content, list):
        for item in content:
            yield from _missing(item, name)


def _create(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    content = json.loads(body)
    google.bodies.append(content)
    if missing := [*_missing(content)]:
        return 400, error(400, f"Required fields are not set: {', '.join(missing)}")
    return 200, google.create(match[1], content)


def _list(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    """Filters jobs by label as Vertex AI does, in pages of two."""
    region = match[1].rsplit("/", 1)[-1]
    if google.lists_nothing:
        google.lists_nothing -= 1
        return 200, {}
    jobs = [job for job in google.jobs.values() if f"/{region}/" in job["name"]]
    wanted = re.fullmatch(r"labels\.([\w-]+)(?:=|:)(.*)", query.get("filter", ""))
    if wanted:
        label, value = wanted.groups()
        jobs = [job for job in jobs if label in job.get("labels", {})]
        jobs = [job for job in jobs if value in ("*", job["labels"][label])]
    return 200, _page("customJobs", jobs, 2, query)


def _page(key: str, found: list[Json], size: int, request: Json) -> Json:
    first = int(request.get("pageToken") or 0)
    more = {"nextPageToken": str(first + size)} if len(found) > first + size else {}
    return {key: found[first : first + size], **more}


def _get(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    job = google.jobs.get(match[1])
    answer = (200, dict(job)) if job else (404, error(404, f"customJobs {match[1]} is not found"))
    # its machines are down when it is asked for again
    if job and job["state"] == "JOB_STATE_CANCELLING":
        google.end(job, "CANCELLED")
    return answer


def _cancel(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    job = google.jobs.get(match[1])
    if not job:
        return _get(google, match, query, body)
    google.end(job, "CANCELLING")
    return 200, {}


def _entries(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    """Returns entries of a job since a time, in pages of three."""
    request = json.loads(body)
    since = re.search(r'timestamp>="([^"]+)"', request["filter"])
    wanted = dict(re.findall(r'labels\.(\w+)="([^"]+)"', request["filter"]))
    assert "job_id" in wanted
    found = [
        entry for entry in google.logs if wanted.items() <= entry["resource"]["labels"].items()
    ]
    found = [entry for entry in found if not since or entry["timestamp"] >= since[1]]
    found.sort(key=lambda entry: entry["timestamp"], reverse="desc" in request.get("orderBy", ""))
    return 200, _page("entries", found, 3, request)


def _token(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    """Returns a token of the account that signed the assertion."""
    claims = parse_qs(body.decode())["assertion"][0].split(".")[1]
    return 200, google.issue(json.loads(base64.urlsafe_b64decode(claims + "=="))["iss"])


def _secret(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    if match[1] not in google.secrets:
        return 403, error(403, f"Permission 'secretmanager.versions.access' denied on {match[1]}")
    return 200, {
        "name": match[1],
        "payload": {"data": base64.b64encode(google.secrets[match[1]]).decode()},
    }


_ROUTES: dict[str, Callable[..., Response]] = {
    r"POST /v1/(projects/[^/]+/locations/[^/]+)/customJobs": _create,
    r"GET /v1/(projects/[^/]+/locations/[^/]+)/customJobs": _list,
    r"GET /v1/projects/[^/]+/locations/[^/]+/customJobs/(\d+)": _get,
    r"POST /v1/projects/[^/]+/locations/[^/]+/customJobs/(\d+):cancel": _cancel,
    r"GET /v1/(projects/[^/]+/locations/[^/]+)/hyperparameterTuningJobs": (
        lambda google, match, *_: (
            200,
            {"hyperparameterTuningJobs": google.tuning_jobs} if "us-east4" in match[1] else {},
        )
    ),
    r"POST /v2/entries:list": _entries,
    r"GET /v1/(projects/[^/]+/secrets/[^/]+/versions/[^/]+):access": _secret,
    r"POST /token": _token,
    r"GET /v1/userinfo": lambda google, *_: (
        200,
        {"email": list((google.accounts or {}).values())[-1]},
    ),
    r"GET /computeMetadata/v1/instance/service-accounts/default/token": lambda google, *_: (
        200,
        google.issue("job@my-proj.iam.gserviceaccount.com"),
    ),
    r"POST /v1/projects/-/serviceAccounts/([^/]+):generateAccessToken": lambda google, match, *_: (
        200,
        google.issue(match[1]),
    ),
    **storage.ROUTES,
}
