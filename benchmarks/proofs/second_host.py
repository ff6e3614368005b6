"""Answers rows by Google's own prediction server and by ours: `python -m benchmarks.proofs.second_host RUN`.

The model server of the SDK's custom prediction routines hosts the predictor of `trainer.serve`; it needs
`pip install "google-cloud-aiplatform[prediction]"`. Both get the rows of RUN's evaluation part: the answers must have
the same bytes.
"""

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.proofs.equal_answers import ask, evaluation_rows, once_healthy, splits, started
from trainer.base.run_files.run_layout import MODEL

try:
    from google.cloud.aiplatform.prediction.predictor import Predictor
except ImportError as error:
    raise SystemExit(f"error: {error}") from None

MODULE = "benchmarks.proofs.second_host"


class Answers(Predictor):
    """Answers as `trainer.serve` does."""

    def load(self, artifacts_uri: str, **_: Any) -> None:
        """Loads the model of a folder."""
        from trainer.run.served_model import ServedModel

        self.model = ServedModel(Path(artifacts_uri), artifacts_uri)

    def predict(self, instances: Any) -> Any:
        """Returns the answers of a request, in calls of the model's own number of rows."""
        rows, batch = [self.model.row(instance) for instance in instances["instances"]], self.model.fixed_batch
        parts = (self.model.answers(rows[at : at + batch]) for at in range(0, len(rows), batch))
        return {"predictions": [answer for part in parts for answer in part]}


def googles(run: str, port: int) -> subprocess.Popen[bytes]:
    """Returns the process of Google's server once it has loaded the model."""
    variables = {
        "HANDLER_MODULE": "google.cloud.aiplatform.prediction.handler", "HANDLER_CLASS": "PredictionHandler",
        "PREDICTOR_MODULE": MODULE, "PREDICTOR_CLASS": "Answers", "AIP_STORAGE_URI": f"{run}/{MODEL}",
        "AIP_HTTP_PORT": str(port), "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict",
        "VERTEX_CPR_WEB_CONCURRENCY": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "google.cloud.aiplatform.prediction.model_server"]
    return once_healthy(subprocess.Popen(command, env={**os.environ, **variables}), port)


def main() -> None:
    """Prints how many rows agreed; exits with 1 if an answer differs."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    cli.add_argument("run")
    cli.add_argument("--rows", type=int, default=200)
    cli.add_argument("--port", type=int, default=8095)
    args = cli.parse_args()
    rows, draw, answers = evaluation_rows(args.run, args.rows), random.Random(0), []
    for port, start in ((args.port, started), (args.port + 1, googles)):
        server = start(args.run, port)
        try:
            answers.append([answer for part in splits(rows, draw) for answer in ask(port, part)])
        finally:
            server.terminate()
            server.wait()
    ours, theirs = answers
    same = sum(our == their for our, their in zip(ours, theirs, strict=True))
    print(f"{same} of {len(rows)} rows have the same answer by Google's server and by ours")
    sys.exit(same < len(rows))


if __name__ == "__main__":
    main()
