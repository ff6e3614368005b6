"""Runs from_fit_to_four_gpus.ipynb from top to bottom in a temporary folder, and stores it with
what its cells show:

    python -m docs.run_notebook                    # look at its outputs before you commit
    python -m docs.run_notebook --out=copy.ipynb   # stores a copy

The kernel is a process of this Python, which listens on sockets of a temporary folder and on
127.0.0.1. Folders of this machine, times, and what else differs in each run are replaced.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = Path(__file__).with_name("from_fit_to_four_gpus.ipynb")
CELL_TIMEOUT_S = 300
# What differs from run to run, and what is stored instead.
UNSTABLE = {
    # TensorFlow's start
    r"(?m)^(WARNING: All log messages before absl|To enable the following|[IWE]0000 ).*\n?": "",
    r"(?m)^Matplotlib is building the font cache.*\n": "",  # on a slow machine
    r"/plans/[0-9a-f]+\.json": "/plans/….json",
    r"\d{8}-\d{6}-[0-9a-f]{4}": "20261231-235959-abcd",  # a submission
    # the bar has the rest of the line's width
    r"━+ (\d+/\d+) [\d,.]+ examples/s ": r"━━━━━━━━━━ \1 … examples/s ",
    r"done \([\d.]+ s\)": "done (… s)",
}
# Rows of a comparison's table.
MEASURED = (
    "time of a run",
    "examples/s",
    "speed-up",
)


class ThisPython(AsyncKernelManager):
    """Starts kernels of the Python that runs this script, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """Returns the command of the kernel."""
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        )


def executed(source: Path) -> Any:
    """Returns the notebook with the outputs of a run. Raises CellExecutionError if a cell fails."""
    notebook = nbformat.read(source, as_version=4)
    with TemporaryDirectory() as folder:
        sockets = {
            "transport": "ipc",
            "ip": f"{folder}/kernel",
            "connection_file": f"{folder}/kernel.json",
        }
        client = NotebookClient(
            notebook,
            km=ThisPython(**sockets),
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(cleanup_kc=True, env=environment(folder))
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [*cleaned(cell.outputs, folder)]
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
    }
    return notebook


def environment(folder: str) -> dict[str, str]:
    """Returns that of the kernel: this checkout, no GPU, and nothing that the user has configured
    or cached."""
    own = {
        "CLOUDSDK_CONFIG": "gcloud",
        "IPYTHONDIR": "ipython",
        "MPLCONFIGDIR": "mpl",
        "XDG_CACHE_HOME": ".cache",
    }
    found = {**os.environ, **{name: f"{folder}/{path}" for name, path in own.items()}}
    # with it the trainer shows what TensorFlow prints at its start
    found.pop("TF_CPP_MIN_LOG_LEVEL", None)
    return {**found, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def cleaned(outputs: list[Any], folder: str) -> Iterator[Any]:
    """Yields the outputs of a cell as they are stored; `folder`: where it ran."""
    for output in outputs:
        shown = {"text": output.text} if output.output_type == "stream" else output.data
        for kind in [kind for kind in shown if kind.startswith("text")]:
            text = shown[kind].replace("\r\n", "\n")  # as a terminal ends lines
            shown[kind] = stable(text.replace(folder, "~").replace(str(ROOT), "~"))
        output.update(shown if output.output_type == "stream" else {})
        if "".join(map(str, shown.values())).strip():
            yield output


def stable(text: str) -> str:
    """Returns the text without what differs from run to run."""
    for pattern, replacement in UNSTABLE.items():
        text = re.sub(pattern, replacement, text)
    return "".join(map(_without_values, text.splitlines(keepends=True)))


def _without_values(line: str) -> str:
    """Replaces the columns of a table's row that was measured, and leaves other lines as they
    are."""
    if not line.startswith(MEASURED):
        return line
    return re.sub(r"(?<=  )\S+( \S+)*", lambda found: "…".rjust(len(found[0])), line)


def main() -> None:
    """Stores the notebook."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=NOTEBOOK, metavar="FILE", help="where to store it"
    )
    out = parser.parse_args().out
    nbformat.write(executed(NOTEBOOK), out)


if __name__ == "__main__":
    main()
