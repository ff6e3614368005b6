"""Runs the tests that depend on the versions of Python, TensorFlow, Keras or Google's packages on
other versions.

`make test-floor` runs them on the oldest supported, `make test-versions` on that and on the newest
Python; `python tests/versions.py 3.12` on one of those between. A Python that is not installed, or
that is the default one, is skipped with a line that states it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOOR = "3.11"
NEWEST = "3.13"
TENSORFLOW = {FLOOR: "tensorflow==2.20.*", "3.12": "tensorflow", "3.13": "tensorflow"}

# A whole job, resumed and on more replicas; models, layers and callbacks of a user's.
JOBS = tuple(
    f"trainer/run/test_job.py::test_{name}"
    for name in (
        "a_run_leaves_what_the_contract_says",
        "the_same_command_resumes_until_the_run_is_done",
        "more_replicas_resume_with_the_same_numbers",
        "a_subclassed_model_is_saved_as_far_as_keras_can",
        "a_callback_can_stop_the_run_and_a_fault_is_kept_in_the_result",
    )
)
# Of the Pythons that have the newest TensorFlow, as the default one: syntax, imports, jobs, the
# wheel, Google's SDK.
ON_EVERY_PYTHON = (
    "trainer/invariance/test_internals.py",
    *JOBS,
    "trainer/base/settings/test_request.py",
    "deploy/test_main.py",
    "deploy/packaging/test_packages.py",
    "deploy/platform/test_backends.py",
)
# Training on replicas and workers in float64 and compiled, layers that draw, saving, resuming and
# exporting.
ON_THE_FLOOR = (
    "trainer/models/test_models.py::test_in_float64_replicas_agree_to_1e_10",
    "trainer/training/test_xla_choice.py::test_in_float64_a_compiled_step_agrees_to_1e_10",
    "trainer/data/test_user_data.py::test_two_replicas_give_the_numbers_of_one",
    "trainer/invariance/test_keras_draws.py",
    "trainer/training/test_checkpoint.py",
    "trainer/run/test_export.py",
)

# slow: of one model alone
WORKERS = "e2e/test_workers.py::test_any_cluster_gives_the_numbers_of_one_worker"


def find_python(version: str) -> str | None:
    """Returns a working Python of that version: named by PYTHON310 and so on, or on the PATH."""
    named = os.environ.get(f"PYTHON{version.replace('.', '')}")
    candidates = [
        named,
        shutil.which(f"python{version}"),
    ]
    for candidate in filter(None, candidates):
        command = [candidate, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return str(candidate)
    return None


def install(python: str, version: str) -> str:
    """Creates a virtual environment with this package and that Python's TensorFlow; returns its
    interpreter."""
    venv = ROOT / f".venv-{version}"
    interpreter = str(venv / "bin" / "python")
    stamp = venv / ".installed"
    sources = [ROOT / "setup.py", ROOT / "tests" / "requirements-gcs.txt"]
    if not stamp.exists() or stamp.stat().st_mtime < max(
        source.stat().st_mtime for source in sources
    ):
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        packages = [TENSORFLOW[version], "--editable", ".[test]"]
        pinned = ["--require-hashes", "--no-deps", "--requirement", "tests/requirements-gcs.txt"]
        for what in (packages, pinned):
            subprocess.run(
                [interpreter, "-m", "pip", "install", "--quiet", *what], cwd=ROOT, check=True
            )
        stamp.touch()
    return interpreter


def run(version: str) -> int:
    """Runs the tests on one Python. Returns their exit code, or 0 if there is no such Python."""
    python = find_python(version)
    if version == f"{sys.version_info.major}.{sys.version_info.minor}" and version != FLOOR:
        print(
            f"Python {version}: skipped: it is the default one, and all tests run on it", flush=True
        )
        return 0
    if python is None:
        where = f"PYTHON{version.replace('.', '')}=/path/to/python{version}"
        print(f"Python {version}: skipped: not installed (name one with {where})", flush=True)
        return 0
    interpreter = install(python, version)
    show = (
        "import sys, tensorflow as tf, keras; print('Python', sys.version.split()[0], 'TensorFlow',"
        " tf.__version__, "
    )
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run(
        [interpreter, "-c", f"{show}'Keras', keras.__version__, flush=True)"], check=True, env=quiet
    )
    subprocess.run([interpreter, "-m", "pip", "check"], check=True)
    tests = [
        f"tests/{name}" for name in (*ON_EVERY_PYTHON, *(ON_THE_FLOOR if version == FLOOR else ()))
    ]
    pytest = [
        interpreter,
        "-m",
        "pytest",
        "-q",
        "-n",
        "3",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
    ]
    pytest += ["-m", "not slow", "-k", "not gcloud"]  # gcloud brings its own Python
    code = subprocess.run([*pytest, *tests], cwd=ROOT).returncode
    if code == 0 and version == FLOOR:
        code = subprocess.run([*pytest[:4], f"tests/{WORKERS}", "-k", "mlp"], cwd=ROOT).returncode
    return code


def main(versions: list[str]) -> int:
    """Runs the tests on each version. Returns 0 if they pass on all, else 1."""
    unknown = [version for version in versions if version not in TENSORFLOW]
    if unknown:
        print(f"{unknown[0]}: not one of {', '.join(TENSORFLOW)}")
        return 2
    codes = [run(version) for version in versions or (FLOOR, NEWEST)]
    return int(any(codes))  # negative if a signal ended the run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
