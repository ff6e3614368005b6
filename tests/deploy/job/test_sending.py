"""Tests that no job is lost track of: with real gcloud and the SDK, against the emulator with
injected faults."""

import pytest

from deploy.job.ledger import Submission
from deploy.job.sending import Creation
from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.errors import gcloud_error, lost_response
from deploy.platform.gcloud_and_sdk import BACKENDS
from deploy.platform.retries import CLOCK
from tests.deploy.conftest import needs_gcloud
from tests.deploy.emulator import Emulator
from tests.deploy.job.test_job import job
from tests.fixtures import Patch
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
    ("text", "code", "fate"),
    [
        ("(gcloud.ai) Invalid value for [region]: Available values are [a]", 400, "refused"),
        ("(gcloud.ai) ABORTED: another request", 409, "refused"),
        ("(gcloud.ai) UNIMPLEMENTED: no such method", 501, "refused"),
        ("(gcloud.ai) UNKNOWN: x", 500, "lost"),
        (f"gcloud crashed (SSLError): {TLS}'[SSL: CERTIFICATE_VERIFY_FAILED]')))", 0, "refused"),
        (f"gcloud crashed (SSLError): {TLS}'[SSL: UNEXPECTED_EOF_WHILE_READING]')))", 0, "lost"),
        (f"gcloud crashed (ProxyError): {PROXY}connect', OSError('407 x')))", 0, "refused"),
        ("gcloud crashed (ConnectionError): NewConnectionError('[Errno 111] x')", 0, "retried"),
        ("gcloud crashed (ConnectionError): RemoteDisconnected('Remote end closed')", 0, "lost"),
        ("gcloud crashed (InvalidDataFromServerError): Error decoding response", 0, "lost"),
    ],
)
def test_what_gcloud_prints_is_a_refusal_or_a_lost_answer(text: str, code: int, fate: str) -> None:
    error = gcloud_error(1, f"Using endpoint [x]\nERROR: {text}\n\nIf you would like to report\n")
    assert error.code == code
    assert error.transient == (fate != "refused")
    assert error.may_have_succeeded == (fate == "lost")
    assert "report" not in str(error)


def test_a_gcloud_that_is_killed_may_have_sent_the_job() -> None:
    killed = gcloud_error(-9, "ERROR: (gcloud.ai.custom-jobs.create) INVALID_ARG")
    assert killed.may_have_succeeded
    assert "killed by signal 9" in str(killed)
    assert gcloud_error(2, "ERROR: (gcloud.ai) unknown words").code == 400


def test_the_reason_of_a_lost_response_is_its_message_and_not_its_headers() -> None:
    log = (
        "DEBUG: Retrying request to url http://h/v1 after exception HttpError accessing"
        " <http://h/v1>: response: <{'server': 'ESF', 'status': 503}>, content <{\n \"error\":"
        ' {\n  "code": 503,\n  "message": "away \\"now\\"",\n  "status": "UNAVAILABLE"}}>\n'
    )
    assert str(lost_response(log)) == 'away "now"'
    assert lost_response(log).code == 503
    assert str(lost_response(log.partition(", content")[0])) == "the service gave no reason"
    assert (
        lost_response(
            "DEBUG: Retrying request to url x after exception ('Connection aborted.', X())"
        ).code
        == 0
    )


@pytest.mark.parametrize("kind", [pytest.param("gcloud", marks=needs_gcloud), "sdk"])
@pytest.mark.parametrize(
    ("variable", "match"),
    [("tls", "no secure connection .*WRONG_VERSION_NUMBER"), ("HTTP_PROXY", "through the proxy")],
)
def test_neither_tls_nor_a_proxy_is_waited_for(
    variable: str, match: str, kind: str, cloud: Emulator, monkeypatch: Patch
) -> None:
    """No request reaches the service, so no job is looked for."""
    secure = cloud.url.replace("http:", "https:")
    if variable == "HTTP_PROXY":
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
    else:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", f"{secure}/")
    began = CLOCK.now()
    with pytest.raises(ApiError, match=match) as caught:
        Creation(job("cpu"), Submission("s1"), BACKENDS[kind])._request_job()
    assert not caught.value.may_have_succeeded
    assert CLOCK.now() - began == 0.0
    assert cloud.requests == []


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
