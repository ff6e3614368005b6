"""What is shipped: named by its sources, built from a clean copy, and installed as Vertex AI's
containers do."""

import importlib.metadata
import json
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from deploy.__main__ import main
from deploy.packaging import distributions
from deploy.packaging import packages as package
from deploy.packaging.distributions import requirements
from deploy.packaging.image_choice import IMAGE_RECORD, PLAIN_IMAGE, remembered
from deploy.packaging.packages import Package, packages_with, trainer_package, user_package
from deploy.platform.errors import STATE_UNKNOWN
from tests.deploy.conftest import WHERE, Capture, Command, error_of, run, stand_in
from tests.deploy.planted import write_files
from tests.fixtures import Patch
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import trainer_commit

SHIPPED = (
    "inner/__init__.py inner/tables-1.0/deep/table.json plain/layers.py __init__.py table.json"
)


def mine(folder: str = ".", name: str = "my_models") -> Path:
    """A package of a user's own."""
    names = f"{SHIPPED} __pycache__/gan.pyc .secret"
    code = {"gan.py": "def build(config, dataset): ...\n"}
    return write_files(dict.fromkeys(names.split(), "") | code, Path(folder, name))


def test_the_name_is_that_of_the_sources() -> None:
    Path("a").write_bytes(b"x")
    one = Package("p", "1", {"a": Path("a"), "b": b"y"})
    assert one.digest == Package("p", "1", {"b": b"y", "a": b"x"}).digest
    others: list[dict[str, bytes]] = [
        {"a": b"xb", "b": b"y"},
        {"a": b"y", "b": b"x"},
        {"a": b"bc"},
        {"ab": b"c"},
    ]
    assert len({one.digest, *(Package("p", "1", files).digest for files in others)}) == 5
    vars(one)["sha256"] = "0123456789abcdef"  # as of a wheel that was built
    name = f"p-1-{one.digest}-0123456789ab/p-1-py3-none-any.whl"
    assert one.uri("gs://b/c") == f"gs://b/c/packages/{name}"


def test_wheel_and_sdist_hold_what_runs_and_nothing_else(dist: Path) -> None:
    built = trainer_package()
    wheel = built.build()
    assert wheel == dist / built.folder / built.wheel
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("trainer/commit.txt").decode().strip() == trainer_commit()
    ours = {"trainer/task.py", "trainer/recipes/wgan_gp_digits.yaml", "trainer/data/digits.npz"}
    assert (
        ours | {"deploy/tiers/machines.yaml", "deploy/Dockerfile", "deploy/cloudbuild.yaml"}
        <= names
    )
    assert not [
        name for name in names if name.startswith(("tests", "benchmarks")) or "__pycache__" in name
    ]
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/trainer/task.py") for name in archive.getnames())
    before = wheel.stat().st_mtime_ns
    assert built.build().stat().st_mtime_ns == before  # the same sources are not built again


@pytest.mark.slow
def test_every_dist_folder_holds_the_same_bytes(monkeypatch: Patch) -> None:
    """Built by others, at other times: here so that the environment says so, which setuptools takes
    for the time."""
    wheels = []
    for number, (time, umask) in enumerate([("1000000000", 0o022), ("1500000000", 0o077)]):
        monkeypatch.setattr(package, "DIST", Path(f"dist{number}"))
        monkeypatch.setenv("SOURCE_DATE_EPOCH", time)
        before = os.umask(umask)
        try:
            wheels.append(user_package(str(mine(str(number)))).build())
        finally:
            os.umask(before)
    one, other = wheels
    assert one.relative_to(Path("dist0")) == other.relative_to(Path("dist1"))
    assert one.read_bytes() == other.read_bytes()


def test_a_package_of_the_users_own_goes_along_whole(typed: Command) -> None:
    """Whatever its spelling; pip wants small letters in the wheel's name."""
    folder = mine(name="My_Models")
    (folder / "requirements.txt").write_text("# what it needs\neinops>=0.7  # for shapes\n\n")
    with zipfile.ZipFile(user_package(str(folder)).build()) as archive:
        names = set(archive.namelist())
        about = archive.read("my_models-0.dist-info/METADATA").decode()
    assert {name for name in names if ".dist-info" not in name} == {
        f"My_Models/{name}" for name in ("gan.py", "requirements.txt", *SHIPPED.split())
    }
    where = [*WHERE, "--project=p", f"--package={folder}"]
    typed("submit", "--spec", "cpu", "--model=My_Models.gan:build", "--data=digits", *where)
    assert re.findall("Requires-Dist: (.*)", about) == ["einops>=0.7"]


def test_one_module_goes_along_with_those_beside_it_that_it_imports(typed: Command) -> None:
    """But for one that has the name of this package, which it means."""
    texts = {
        "mine.py": "import os, trainer, other\ndef build(config, dataset): ...\n",
        "other.py": "import inner.part",
        "inner/part.py": "",
        "inner/more.py": "",
        "trainer/__init__.py": "",
        "lost.py": "",
    }
    write_files(texts)
    with zipfile.ZipFile(user_package("mine.py").build()) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
    assert names == {"mine.py", "other.py", "inner/part.py"}
    flags = ["--model=mine:build", "--data=digits", *WHERE, "--project=p"]
    typed("submit", "--spec", "cpu", *flags, "--package=./mine.py")


NEEDS = """\
import csv, numpy, matplotlib.pyplot
from trainer.invariance import losses
try:
    import not_here
except ImportError:
    not_here = None
rows = [*csv.reader(open("data/churn.csv"))]
print(open("churn.log", "w"))
"""


def test_what_one_module_imports_is_installed_and_what_it_names_lies_where_it_runs(
    dist: Path, capsys: Capture
) -> None:
    """TensorFlow's own packages are there already; a requirements.txt beside the module replaces
    what it imports."""
    write_files({"data/churn.csv": "1", "churn.log": "", "data/.x": "", "b.csv": ""})
    flags = ["--model=churn:build", "--data=churn:rows", "--package=churn.py", "--project=p"]
    Path("churn.py").write_text(f"{NEEDS}def build(config, dataset): ...\n")
    assert main(["submit", "--spec", "cpu", *WHERE, *flags]) == 0
    text, shown = capsys.readouterr()
    version = importlib.metadata.version("matplotlib")
    assert (
        f"pip installs matplotlib>={version} for it; its folder there has data/churn.csv\n" in shown
    )
    plan = json.loads(re.findall(r"TRAINER_START\n *value: '(.*)'\n", text)[0])
    archive = dist / "/".join(plan["code"][0].rsplit("/", 2)[1:]).replace(
        f"-{plan['code'][1][:12]}", ""
    )
    assert zipfile.ZipFile(archive).namelist() == ["code/data/churn.csv"]
    Path("requirements.txt").write_text("einops\n")
    assert user_package("churn.py").about.endswith("0.0 MB; its folder there has data/churn.csv")
    Path("requirements.txt").unlink()
    Path("churn.py").write_text("import not_here")
    assert (
        "churn.py, line 1, imports not_here, which is not installed here: install it here"
        in error_of(user_package, "churn.py")
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nothing", "a folder that Python can import"),
        ("my-models", "such as my_models"),
        ("_models", "such as my_models"),
        ("modèles", "such as my_models"),
        ("trainer", "a name of this project"),
        ("Vertex__trainer", "a name of this project"),
    ],
)
def test_a_folder_that_is_no_package_is_refused(name: str, line: str) -> None:
    if name != "nothing":
        Path(name).mkdir()
        Path(f"{name}/__init__.py").write_text("")
    assert line in error_of(user_package, name)


def test_a_package_that_does_not_build_says_why(dist: Path) -> None:
    folder = mine()
    (folder / "requirements.txt").write_text("not a requirement\n")
    with pytest.raises(UserError, match=r"my_models could not be built: .*requirement"):
        user_package(str(folder)).build()
    assert not (dist / user_package(str(folder)).folder).exists()


@pytest.mark.slow
def test_an_installed_copy_has_tiers_and_sends_the_same_sources() -> None:
    site = Path("site").absolute()
    desk = Path("desk")
    zipfile.ZipFile(trainer_package().build()).extractall(site)
    desk.mkdir()
    flags = ["--recipe=wgan_gp_digits", "--project=my-proj", *WHERE, "--spec"]
    done = run(
        [sys.executable, "-m", "deploy", "submit", "cpu", *flags],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=desk,
    )
    assert done.returncode == 0, done.stderr
    assert trainer_package().uri("gs://my-bucket") in done.stdout
    assert not (site / "setup.py").exists()
    (entry,) = site.glob("*.dist-info/entry_points.txt")
    assert "vertex-trainer = deploy.__main__:program" in entry.read_text()
    assert (site / "vertex_trainer" / "py.typed").is_file()


def test_an_image_is_built_from_a_clean_copy(monkeypatch: Patch, typed: Command) -> None:
    uri = "us-docker.pkg.dev/my-proj/repo/trainer:1"
    flags = ["--tensorflow=tensorflow[and-cuda]>=2.20,<2.22", "--project=my-proj"]
    flags.append(f"--package={mine()}")
    shown = typed("image", f"--image={uri}", "--dry-run", *flags)
    context = Path("dist/image")
    assert (
        shown.strip() == "# ships my_models: 6 files, 0.0 MB\n"
        f"gcloud builds submit --project=my-proj --config={context}/cloudbuild.yaml "
        f"'--substitutions=^;^_IMAGE={uri};_TENSORFLOW=tensorflow[and-cuda]>=2.20,<2.22' "
        f"'--format=value(results.images[0].digest)' {context}"
    )
    names = sorted(path.name for path in context.iterdir())
    assert names == ["Dockerfile", "cloudbuild.yaml", "packages"]
    packages = sorted(file.parent.name for file in context.glob("packages/*/setup.py"))
    assert packages == ["my_models", "vertex_trainer"]
    assert not list(context.rglob("*.pyc"))
    dockerfile = (context / "Dockerfile").read_text()
    for source in re.findall(r"(?m)^COPY (\S+)", dockerfile):
        assert (context / source).exists()
    steps = yaml.safe_load((context / "cloudbuild.yaml").read_text())
    assert set(re.findall(r"\$(_[A-Z]+)", json.dumps(steps))) == {"_IMAGE", "_TENSORFLOW"}
    assert "USER trainer" in dockerfile
    assert f"FROM {PLAIN_IMAGE}\n" in dockerfile, "as without an image"
    monkeypatch.setattr(distributions, "versions", dict)
    newest, _ = requirements(1)
    assert f'TENSORFLOW="{newest}"' in dockerfile
    assert steps["substitutions"]["_TENSORFLOW"] == newest


def test_gcloud_is_run_and_its_end_is_ours(monkeypatch: Patch, typed: Command) -> None:
    """The image is remembered by its digest, which gcloud's last line is, with its tag; one without
    is told."""
    sources = {package.name: package.digest for package in packages_with("")}
    digest = f"sha256:{'a1' * 32}"
    name = "us-docker.pkg.dev/p/r/x"
    for code, line, uri in ((0, digest, f"{name}@{digest}"), (0, "", f"{name}:1"), (1, digest, "")):
        stand_in(f'echo "$@" > "./given"\necho log\necho {line}\nexit {code}', monkeypatch)
        shown = typed("image", f"--image={name}:1", code=code)
        assert Path("given").read_text().startswith("builds submit")
        found = remembered()
        tag = f"{name}:1" if line else ""
        kept = found and (found.uri, found.sources, found.tag)
        assert kept == (None if code else (uri, sources, tag))
        assert ("warning: gcloud named no digest: jobs run in" in shown) == (not line)
        IMAGE_RECORD.unlink(missing_ok=True)
    stand_in(f"sleep 0.3\nkill -INT {os.getpid()}\nsleep 0.5", monkeypatch)
    error = typed("image", f"--image={name}:1", code=STATE_UNKNOWN)
    assert "error: stopped: the build may go on: look at https://" in error
