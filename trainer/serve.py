"""Serves the model of a run over HTTP: `python -m trainer.serve RUN --port=8080`, or as a container
of Vertex AI.

GET /health answers 200 once the model is loaded; POST /predict takes {"instances": […]}
(docs/serving.md).
"""

import os
import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, UserError
from trainer.base.log import log
from trainer.base.run_files.serving_file import model_folder
from trainer.base.settings.fields import Usage, options_class, parse_options, setting
from trainer.user_code.command import command, quiet_start

USAGE = Usage("python -m trainer.serve", "RUN [--port=8080] [--host=ADDRESS]", __doc__)


@options_class
class ServeOptions:
    """Holds the options of `trainer.serve`; a container's variables are their defaults."""

    run: str = setting(
        "", "a job directory or its model/; also at gs://", metavar="RUN", positional=True
    )
    host: str = setting("", "address to bind (default: 127.0.0.1, in a container all)")
    port: int | None = setting(None, "port to bind (default: 8080)", minimum=1, maximum=65535)


@command("serves again")
def main(arguments: Sequence[str]) -> int:
    """Serves the model until SIGTERM or Ctrl-C, and returns the exit code."""
    args = parse_options(ServeOptions, arguments, USAGE)
    run = args.run or os.environ.get("AIP_STORAGE_URI", "")
    host = args.host or ("0.0.0.0" if "AIP_HTTP_PORT" in os.environ else "127.0.0.1")  # noqa: S104
    port = args.port or int(os.environ.get("AIP_HTTP_PORT", "8080"))
    if not run:
        raise UserError("no run is given: python -m trainer.serve RUN")
    try:
        import starlette  # noqa: F401 (the server needs both)
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError(
            "starlette or uvicorn is not installed: pip install starlette uvicorn"
        ) from None
    with quiet_start():
        from trainer.run.http_server import serve
        from trainer.run.served_model import ServedModel

    def load() -> ServedModel:
        model = ServedModel(model_folder(run), run)
        rows = f"up to {model.most_rows:,} rows a call"
        log.info(
            f"{run} is served at http://{host}:{port}, {rows}; /v2/models/model says what it takes"
        )
        return model

    serve(load, host, port)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
