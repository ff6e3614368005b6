"""Starts a job: looks for the GPU driver, fetches and installs what the job needs, then runs the
trainer or a script.

This file lies in the bucket beside the packages. The command in a job's spec downloads and runs it
before anything is installed, so that it uses the standard library alone.

The variable TRAINER_START is JSON: "gpus", the number of the machine's GPUs; "requirements" to
install; "packages", a list of [address, SHA-256]; and "module", which is run. A script also has
"code", the [address, SHA-256] of its archive, and one that runs as it is "script", for
`script_worker`. The variable TRAINER_SECRETS is JSON, too: a version of a secret for each variable
that gets its value.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from typing import NoReturn

# exit codes, the same as the trainer's
MUST_CHANGE = 2
FAULT = 1
# of a request; the pause doubles after each further try
TRIES = 6
PAUSE_S = 2.0
TIMEOUT_S = 60.0
STORAGE = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")


def main() -> None:
    """Prepares this machine and replaces this process by the job's program.

    Prints one line and exits with MUST_CHANGE or FAULT if the preparation fails.
    """
    plan = json.loads(os.environ["TRAINER_START"])
    if plan["gpus"]:
        find_driver()
    for name, version in json.loads(os.environ.pop("TRAINER_SECRETS", "{}")).items():
        os.environ[name] = secret(version)
    program = ["-m", plan["module"]]
    if "code" in plan:
        folder = tempfile.mkdtemp()
        address, digest = plan["code"]
        with zipfile.ZipFile(download(address, digest, folder)) as archive:
            archive.extractall(folder)
        os.chdir(os.path.join(folder, "code"))  # where requirements.txt lies, too
        if "script" in plan:
            os.environ["TRAINER_SCRIPT"] = json.dumps({**plan["script"], "folder": os.getcwd()})
            program = [os.path.join(folder, "ours")]
    with tempfile.TemporaryDirectory() as scratch:
        wheels = [download(address, digest, scratch) for address, digest in plan["packages"]]
        if packages := [*plan["requirements"], *wheels]:
            install(packages)
    os.execv(sys.executable, [sys.executable, *program, *sys.argv[1:]])  # noqa: S606 (no shell is meant)


def find_driver() -> None:
    """Ends the job if NVIDIA's driver cannot be loaded: paid GPUs would be idle."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        folders = os.environ.get("LD_LIBRARY_PATH", "")
        end(
            f"libcuda.so.1, NVIDIA's driver, is neither in LD_LIBRARY_PATH ({folders}) nor in the"
            " system's folders: this image cannot use the machine's GPUs: use --image=URI with one"
            " that `python -m deploy image` built",
            MUST_CHANGE,
        )


def download(address: str, digest: str, folder: str) -> str:
    """Downloads a gs:// object to `folder` and returns its path.

    Ends the job if its SHA-256 differs.
    """
    content = read_url(object_url(address), address, "roles/storage.objectViewer")
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        end(
            f"{address}: its SHA-256 is {actual}, not {digest} as when the job was submitted:"
            " submit it again",
            MUST_CHANGE,
        )
    path = os.path.join(folder, address.rsplit("/", 1)[-1])
    pathlib.Path(path).write_bytes(content)
    return path


def object_url(address: str) -> str:
    """Returns the URL from which the content of the object gs://BUCKET/NAME can be read."""
    bucket, _, name = address.removeprefix("gs://").partition("/")
    return f"{STORAGE}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"


def token() -> str:
    """Returns an access token of the job's account:
    https://cloud.google.com/compute/docs/access/authenticate-workloads

    Raises OSError if the metadata server does not answer.
    """
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    return str(json.loads(request(url, {"Metadata-Flavor": "Google"}))["access_token"])


def secret(version: str) -> str:
    """Returns the value of a secret, or ends the job if it cannot be read.

    version: projects/P/secrets/S/versions/V, as in
    https://docs.cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access
    """
    host = os.environ.get("SECRET_MANAGER_HOST", "https://secretmanager.googleapis.com")
    answer = json.loads(
        read_url(f"{host}/v1/{version}:access", version, "roles/secretmanager.secretAccessor")
    )
    try:
        return base64.b64decode(answer["payload"]["data"]).decode()
    except (KeyError, TypeError, ValueError):
        end(f"{version}: the secret is not text, which a variable needs", MUST_CHANGE)


def read_url(url: str, subject: str, role: str) -> bytes:
    """Returns the content of a URL, read as the job's account, or ends the job with one line.

    `subject`: what the line says that could not be read; `role`: the role that the account needs
        for it.
    """
    try:
        return request(url, {"Authorization": f"Bearer {token()}"})
    except PermissionError as error:
        end(f"{subject}: {error}: the job's account must be able to read it ({role})", MUST_CHANGE)
    except OSError as error:
        end(f"{subject}: cannot be read: {error}", FAULT)


def request(
    url: str, headers: dict[str, str], body: bytes | None = None, missing: bytes | None = None
) -> bytes:
    """Sends a GET, or a POST if there is a `body`, and returns the body of the response.

    It is repeated up to TRIES times while the service or the network fails; then OSError is raised.
    `missing`: what to return for a 404. Raises PermissionError at once if the account may not do
    it, or for a 404 without `missing`.
    """
    problem = ""
    for attempt in range(TRIES):
        time.sleep(PAUSE_S * 2 ** (attempt - 1) if attempt else 0.0)
        message = urllib.request.Request(url, body, headers)  # noqa: S310 (always http or https)
        try:
            with urllib.request.urlopen(message, timeout=TIMEOUT_S) as response:  # noqa: S310
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}"
            if error.code == 404 and missing is not None:
                return missing
            if error.code in (401, 403, 404):
                raise PermissionError(problem) from None
        except (OSError, ValueError) as error:
            problem = str(error)
    raise OSError(problem)


# Settings of pip that do not say what it installs, nor from where; those in a file are listed
# themselves.
_OF_OUTPUT = {
    "config-file",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-input",
    "progress-bar",
    "quiet",
    "root-user-action",
}


def install(packages: list[str]) -> None:
    """Installs requirements and wheels by one call, so that versions are chosen that fit together:
    by uv, else by pip.

    Ends the job if that fails. https://docs.astral.sh/uv/pip/compatibility/
    """
    began = time.monotonic()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--no-compile",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
        "--quiet",
    ]
    uv = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        sys.executable,
        "--break-system-packages",
        "--quiet",
    ]
    problem = needs_pip(packages)
    if not problem and importlib.util.find_spec("uv") is None:
        problem = failed([*pip, "uv"])
    names = " ".join(map(os.path.basename, packages))
    log_line(f"installs {names} by {f'pip: {problem}' if problem else 'uv'}")
    if not problem and (problem := failed([*uv, *packages])):
        log_line(f"uv failed, and pip installs: {problem}", "WARNING")
    if problem and (error := failed([*pip, *packages])):
        end(
            f"pip install failed: {error}: the job needs a way to the package index, or use"
            " --image=URI",
            FAULT,
        )
    log_line(f"installed in {time.monotonic() - began:.0f} s")


def needs_pip(packages: list[str]) -> str:
    """Returns what pip has to read for these packages, "" if nothing: uv knows no settings of pip.

    Of several indexes uv takes the first that has a package, where pip takes the newest version of
    all.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    names = [line.partition("=")[0].rpartition(".")[2] for line in listed.splitlines()]
    lines = [*packages]
    for path in filter(os.path.isfile, packages):
        if path.endswith(".txt"):
            lines += pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    setting = next((name for name in names if name not in _OF_OUTPUT), "")
    index = next(
        (line.split()[0] for line in lines if re.match(r"-i\b|-f\b|--(.*index|find-links)", line)),
        "",
    )
    return (
        f"its setting {setting}"
        if setting
        else f"{index.partition('=')[0]} in the requirements"
        if index
        else ""
    )


def failed(command: list[str]) -> str:
    """Runs a command, and returns the last line of its error, "" if it has none."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not done.returncode:
        return ""
    lines = [line for line in done.stdout.splitlines() if "ERROR" in line or "error:" in line]
    return (lines or done.stdout.splitlines() or [f"exit code {done.returncode}"])[-1].strip()


def log_line(message: str, severity: str = "INFO") -> None:
    """Prints one line of JSON, from which Cloud Logging reads the severity and the message."""
    print(json.dumps({"severity": severity, "message": message}), flush=True)


def end(message: str, code: int) -> NoReturn:
    """Prints the error in one line and exits with `code`, which ends the job."""
    log_line(f"error: {message}", "ERROR")
    sys.exit(code)


if __name__ == "__main__":
    main()
