"""Serves the model of a run over HTTP: `python -m trainer.serve RUN --port=8080`, or as a container of Vertex AI.

GET /health answers 200 once the model is loaded; POST /predict takes {"instances": […]} (docs/serving.md).
"""

import os
import sys
from collections.abc import Sequence

from trainer.base.errors import DONE, UserError
from trainer.base.log import log
from trainer.base.run_files.serving_file import SAME_BYTES, model_folder
from trainer.base.settings.fields import Parser, integer_in
from trainer.user_code.command import command, quiet_start


@command("serves again")
def main(arguments: Sequence[str]) -> int:
    """Serves the model until SIGTERM or Ctrl-C, and returns the exit code."""
    on_vertex = "AIP_HTTP_PORT" in os.environ  # set in a container of Vertex AI
    parser = Parser(prog="python -m trainer.serve", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("run", nargs="?", default=os.environ.get("AIP_STORAGE_URI", ""), metavar="RUN",
                        help="a job directory or its model/; also at gs://")  # fmt: skip
    parser.add_argument("--host", default="0.0.0.0" if on_vertex else "127.0.0.1", help="address to bind (default: "  # noqa: S104
                        "127.0.0.1, in a container all)")  # fmt: skip
    parser.add_argument("--port", type=integer_in(1, 65535), default=int(os.environ.get("AIP_HTTP_PORT", "8080")),
                        help="(default: 8080)")  # fmt: skip
    parser.add_boolean("same_bytes", SAME_BYTES)
    args = parser.parse_args(arguments)
    if not args.run:
        raise UserError("no run is given: python -m trainer.serve RUN")
    try:
        import starlette  # noqa: F401 (the server needs both)
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("starlette or uvicorn is not installed: pip install starlette uvicorn") from None
    with quiet_start():
        from trainer.run.http_server import serve
        from trainer.run.served_model import ServedModel

    def load() -> ServedModel:
        log.info(f"loads the model of {args.run}")
        model = ServedModel(model_folder(args.run), args.run, same_bytes=args.same_bytes)
        rows = f"{model.most_rows} rows a call" if args.same_bytes else f"up to {model.most_rows:,} rows a call"
        log.info(f"{args.run} is served at http://{args.host}:{args.port}, {rows}; /v2/models/model says what it takes")
        return model

    serve(load, args.host, args.port)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
