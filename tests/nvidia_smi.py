"""Plants an nvidia-smi, which says of one GPU what a test wants."""

import os
from pathlib import Path

import pytest


class PlantedGpu:
    """Puts an nvidia-smi in `folder` first on the path: the GPU is used so many percent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, percent: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._used, tool = folder / "used", folder / "nvidia-smi"
        self.use(percent)
        asked = 'case "$*" in *memory.used*) echo "100, $used" ;; *) echo "$used" ;; esac'
        tool.write_text(f'#!/bin/sh\nread used < "{self._used}"\n{asked}\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def use(self, percent: int) -> None:
        """Lets the GPU be used so many percent from now on."""
        part = self._used.with_suffix(".part")
        part.write_text(f"{percent}\n")
        part.replace(self._used)
