"""Describes a job that answers a file of rows with a registered model; takes the place of a training on a tier."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.images import Image
from deploy.tiers.job_request import JobOptions, JobRequest, WrittenSpec
from trainer.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class PredictionRequest(JobRequest):
    """Holds what is predicted: `model`, for people; the addresses of its files, of the rows and of the answers."""

    model: str
    artifact: str
    image: str
    rows: str
    out: str

    @property
    def job_dir(self) -> str:
        return self.out

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"rows": self.rows, "model": self.artifact}

    @property
    def about(self) -> str:
        return f"answers the rows of {self.rows} with {self.model}"

    def arguments(self) -> list[str]:
        return [self.artifact, f"--rows_file={self.rows}", f"--out={self.out}"]

    def check_folder(self, job_dir: Path) -> None:
        raise UserError(f"out={job_dir}: use an address as gs://BUCKET/FOLDER")

    def in_job_dir(self, job_dir: str) -> "PredictionRequest":
        return dataclasses.replace(self, out=job_dir)

    def choose_image(self, options: JobOptions) -> Image:
        return Image(self.image)

    def write(self, spec: dict[str, Any], gcp: GcpConfig, options: JobOptions, image: Image) -> WrittenSpec:
        spec["workerPoolSpecs"][0].pop("pythonPackageSpec", None)
        spec["workerPoolSpecs"][0]["containerSpec"] = {
            "imageUri": image.uri, "command": ["python", "-m", "trainer.predict"], "args": self.arguments(),
        }  # fmt: skip
        return WrittenSpec((), (f"runs in {image.uri}, the image of the version",), ())
