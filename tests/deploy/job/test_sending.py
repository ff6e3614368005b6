"""Tests that no job is lost track of: with real gcloud and the SDK, against the emulator with
injected faults."""

from functools import partial

import pytest

from deploy.job.ledger import Submission
from deploy.job.sending import Creation
from deploy.platform import buckets
from deploy.platform.errors import gcloud_error, lost_response
from deploy.platform.gcloud_and_sdk import Session
from deploy.platform.retries import ApiError
from deploy.tiers.gcp_config import GcpConfig
from tests.deploy.conftest import needs_gcloud
from tests.deploy.emulator import Emulator
from tests.deploy.job.test_job import job
from trainer.base.storage.gcs import Conflict

TLS = (
    "HTTPSConnectionPool(host='h', port=443): Max retries exceeded with url: /v1/x (Caused by"
    " SSLError(SSLError(1, "
)
PROXY = (
    "HTTPSConnectionPool(host='h', port=443): Max retries exceeded with url: /v1/x (Caused by"
    " ProxyError('Unable to "
)


@pytest.mark.parametrize(
    ("status", "text", "code", "transient", "unclear"),
    [
        (2, "(gcloud.ai.custom-jobs.create) unknown words", 400, False, False),
        (-9, "(gcloud.ai.custom-jobs.create) INVALID_ARG", 0, True, True),
        (
            1,
            "(gcloud.ai.custom-jobs.create) Invalid value for [region]: Available values are [a]",
            400,
            False,
            False,
        ),
        (
            1,
            "(gcloud.ai.custom-jobs.create) argument --region: Invalid choice: 'x'.",
            400,
            False,
            False,
        ),
        (1, "(gcloud.ai.custom-jobs.create) ABORTED: another request", 409, False, False),
        (1, "(gcloud.ai.custom-jobs.create) ALREADY_EXISTS: it is there", 409, False, False),
        (1, "(gcloud.ai.custom-jobs.create) UNIMPLEMENTED: no such method", 501, False, False),
        (1, "(gcloud.ai.custom-jobs.create) UNKNOWN: x", 500, True, True),
        (
            1,
            f"gcloud crashed (SSLError): {TLS}'[SSL: CERTIFICATE_VERIFY_FAILED] (_ssl.c:1)')))",
            0,
            False,
            False,
        ),
        (
            1,
            (
                f"gcloud crashed (SSLError): {TLS}'[SSL: UNEXPECTED_EOF_WHILE_READING] EOF"
                " occurred')))"
            ),
            0,
            True,
            True,
        ),
        (
            1,
            (
                f"gcloud crashed (ProxyError): {PROXY}connect to proxy', OSError('Tunnel connection"
                " failed: 407 x')))"
            ),
            0,
            False,
            False,
        ),
        (
            1,
            (
                f"gcloud crashed (ProxyError): {PROXY}connect to proxy',"
                " NewConnectionError('refused')))"
            ),
            0,
            False,
            False,
        ),
        (
            1,
            (
                "gcloud crashed (ConnectionError): (Caused by NewConnectionError('[Errno 111]"
                " Connection refused'))"
            ),
            0,
            True,
            False,
        ),
        (
            1,
            (
                "gcloud crashed (ConnectionError): ('Connection aborted.',"
                " RemoteDisconnected('Remote end closed'))"
            ),
            0,
            True,
            True,
        ),
        (
            1,
            (
                'gcloud crashed (InvalidDataFromServerError): Error decoding response "<html>" as'
                " type X"
            ),
            0,
            True,
            True,
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_what_gcloud_prints_is_a_refusal_or_a_lost_answer(
    status: int, text: str, code: int, transient: bool, unclear: bool
) -> None:
    error = gcloud_error(
        status,
        f"Using endpoint [x]\nERROR: {text}\n\nIf you would like to report this issue, run x\n",
    )
    assert (error.code, error.transient, error.may_have_succeeded) == (code, transient, unclear)
    assert "report this issue" not in str(error)
    assert ("killed by signal 9" in str(error)) == (status == -9)


def test_the_reason_of_a_lost_response_is_its_message_and_not_its_headers() -> None:
    log = (
        "DEBUG: Retrying request to url http://h/v1 after exception HttpError accessing"
        " <http://h/v1>: response: <{'server': 'ESF', 'status': 503}>, content <{\n \"error\":"
        ' {\n  "code": 503,\n  "message": "away \\"now\\"",\n  "status": "UNAVAILABLE"}}>\n'
    )
    assert (str(lost_response(log)), lost_response(log).code) == ('away "now"', 503)
    assert str(lost_response(log.partition(", content")[0])) == "the service gave no reason"
    assert (
        lost_response(
            "DEBUG: Retrying request to url x after exception ('Connection aborted.', X())"
        ).code
        == 0
    )


def request_job(kind: str, region: str, session: Session) -> None:
    """Requests a job without a reservation."""
    made = job("cpu", gcp=GcpConfig("my-proj", region, "gs://my-bucket"))
    Creation(made, Submission("s1"), partial(session.open, kind))._request_job()


@needs_gcloud
def test_a_region_that_gcloud_refuses_is_not_waited_for(cloud: Emulator, session: Session) -> None:
    with pytest.raises(ApiError, match=r"Invalid value for \[region\]"):
        request_job("gcloud", "mars-east1", session)
    assert cloud.requests == []


@pytest.mark.parametrize("kind", [pytest.param("gcloud", marks=needs_gcloud), "sdk"])
@pytest.mark.parametrize(
    ("variable", "match"),
    [("tls", "no secure connection .*WRONG_VERSION_NUMBER"), ("HTTP_PROXY", "through the proxy")],
)
def test_neither_tls_nor_a_proxy_is_waited_for(
    variable: str,
    match: str,
    kind: str,
    cloud: Emulator,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request reaches the service, so no job is looked for."""
    secure = cloud.url.replace("http:", "https:")
    if variable == "HTTP_PROXY":
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
    else:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", f"{secure}/")
    began = session.clock.now()
    with pytest.raises(ApiError, match=match) as caught:
        request_job(kind, "us-central1", session)
    assert (caught.value.may_have_succeeded, session.clock.now() - began, cloud.requests) == (
        False,
        0.0,
        [],
    )


@pytest.mark.usefixtures("cloud")
def test_a_record_is_replaced_only_by_who_read_it() -> None:
    uri = "gs://my-bucket/jobs/x/submission.json"
    first = buckets.write(uri, "one\n", 0)
    with pytest.raises(Conflict):
        buckets.write(uri, "two\n", 0)
    assert buckets.read_text(uri) == ("one\n", first)
    second = buckets.write(uri, "two\n", first)
    buckets.delete(uri, first)
    assert buckets.read_text(uri) == ("two\n", second)
    buckets.delete(uri, second)
    assert buckets.read_text(uri) == ("", 0)
