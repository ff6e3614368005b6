"""Packs a script's folder, with the programs that run it, as a ZIP file for Cloud Storage."""

import dataclasses
import shutil
import tempfile
import zipfile
from pathlib import Path

from deploy.tiers import packages
from deploy.tiers.packages import Package

_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest ZIP date, for every file: the archive depends on its files alone


@dataclasses.dataclass(frozen=True)
class CodeArchive(Package):
    """Holds files that a job unpacks, where a Package's are installed."""

    @property
    def wheel(self) -> str:
        """Returns the archive's file name."""
        return f"{self._stem}.zip"

    def build(self) -> Path:
        """Returns the archive, which is written if needed."""
        path = packages.DIST / self.folder / self.wheel
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                partial = Path(scratch, self.wheel)
                self._write(partial)
                partial.replace(path)
        return path

    def _write(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(self.files.items()):
                about = zipfile.ZipInfo(name, _TIME)
                about.compress_type, about.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                if isinstance(content, bytes):
                    archive.writestr(about, content)
                    continue
                with content.open("rb") as source, archive.open(about, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target)
