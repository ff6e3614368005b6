"""What `pip install` and a Vertex AI training container need to know of this package."""

import shutil
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = (
    (HERE / "trainer" / "__init__.py")
    .read_text(encoding="utf-8")
    .split('__version__ = "')[1]
    .split('"')[0]
)

# Copied into deploy/checkout/ of a wheel: an installed copy has the tiers, and can build the wheel
# of a job.
CHECKOUT = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "job_configs")

DEPLOY = [
    "google-cloud-aiplatform>=2,<3",
    "build",
    "setuptools>=64",
    "wheel",
    "pathspec>=0.12",
    "detect-secrets>=1.5",
]
SERVE = ["starlette>=1,<2", "uvicorn>=0.54,<1"]
TEST = [
    "pytest>=8.3",
    "pytest-xdist",
    "hypothesis",
    "jsonschema",
    "matplotlib",
    "optuna>=5",
    *DEPLOY,
    *SERVE,
    "argcomplete",
]


class BuildWithCheckout(build_py):
    """Builds the packages, with copies of the files that a checkout has beside them."""

    def run(self) -> None:
        """Copies them, but not for an editable installation, which has the checkout itself."""
        super().run()
        if self.editable_mode:
            return
        self._name_commit()
        folder = Path(self.build_lib) / "deploy" / "checkout"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for source in (HERE / name for name in CHECKOUT):
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / source.name)

    def _name_commit(self) -> None:
        """Writes the commit of the checkout into the package: a job that is installed from a wheel
        then knows it."""
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        )
        if git.returncode == 0 and (HERE / ".git").exists():
            (Path(self.build_lib) / "trainer" / "commit.txt").write_text(
                git.stdout, encoding="utf-8"
            )


setup(
    cmdclass={"build_py": BuildWithCheckout},
    name="vertex-trainer",
    version=VERSION,
    description=(
        "Train Keras models on one device, several GPUs or several machines of Vertex AI, "
        "with the same numbers everywhere"
    ),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(
        include=["trainer", "trainer.*", "deploy", "deploy.*", "vertex_trainer"]
    ),
    entry_points={"console_scripts": ["vertex-trainer = deploy.__main__:program"]},
    package_data={
        "vertex_trainer": ["py.typed"],
        "trainer": ["py.typed", "commit.txt", "recipes/*.yaml", "data/digits.npz"],
        "deploy": [
            "py.typed",
            "cloudbuild.yaml",
            "Dockerfile",
            "tiers/machines.yaml",
            "tiers/schema.yaml",
            "report/report.html",
            "report/page.css",
            "planning/gpu_constants.json",
        ],
    },
    # Installed at each job's start, so few. TensorFlow and Keras end at the newest minor that was
    # tried: numbers depend on private names of theirs (trainer/invariance/internals.py). `deploy`
    # reads both lines.
    install_requires=[
        "tensorflow>=2.20,<2.22",
        "keras>=3.15,<3.16",
        "pyyaml>=6",
        "h5py",
        "pillow>=10.1",
        "rich",
        "google-cloud-storage>=3.2,<4",  # imported only where a gs:// path is used
    ],
    extras_require={
        "local": ["tensorboard"],  # to look at logs/
        "deploy": DEPLOY,
        "report": ["matplotlib"],
        "completion": ["argcomplete"],  # of verbs, tiers and recipes, in a shell
        "serve": SERVE,  # in the image that `deploy image` builds
        "mlflow": ["mlflow-skinny"],  # --track=mlflow:http…
        "wandb": ["wandb"],  # --track=wandb:…
        "test": TEST,
        "dev": [
            *TEST,
            "mlflow-skinny",
            "wandb",
            "mypy",
            "ruff",
            "types-PyYAML",
            "nbclient",
            "nbformat",
            "ipykernel",
        ],
    },
)
