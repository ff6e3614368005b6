"""Measures how long 100 MB take to be searched for credentials: `python -m benchmarks.proofs.credential_scan`.

Three packages: random bytes, tables and code; code alone; and lines that contain the beginnings of many credentials.
Prints seconds of one core for each: at most 10.
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.tiers.sources import user_sources

_NASTY = (
    '{"username": "x", "password": "", "access_token": null, "refresh_token": "", "auths": {}, "u": "@://"} -----BEGIN '
    "private key aws_secret_access_key client_secret sk-x hf_ xoxb- 1:AA sig= machine _auth $2a$ token:"
)


def _packages(code: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields three packages of about 100 MB: what they are, and their files."""
    draw = random.Random(0)
    table = "".join(f"{draw.random()},{draw.random()},user\n" for _ in range(900_000)).encode()
    text = (code * (1 + 200_000 // len(code))).encode()[:200_000]
    mixed = {"weights.bin": os.urandom(40_000_000), "table.csv": table, **{f"{i}.txt": text for i in range(100)}}
    yield "weights, tables and code", mixed
    yield "code alone", {f"{i}.txt": text for i in range(500)}
    yield "the beginnings of credentials", {"x.json": (f"{_NASTY}\n" * (100_000_000 // len(_NASTY))).encode()}


def main() -> None:
    """Prints one line for each package."""
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(Path("trainer").rglob("*.py")))
    for about, files in _packages(code):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            began = time.process_time()
            sources = user_sources(Path(folder), 200)
            print(
                f"{about}: {sources.size / 1e6:.0f} MB in {time.process_time() - began:.1f} s of one core", flush=True
            )


if __name__ == "__main__":
    main()
