"""Finds credentials in files by their content: every byte, UTF-16 too, and what is in archives.

The rules are in credentials.yaml. Nothing is verified over the network.
"""

import bz2
import contextlib
import dataclasses
import gzip
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

from trainer.base.settings.yaml_file import read_yaml

NEWLINE = b"\n"
_PIECE, _OVERLAP = 4 * 2**20, 4096  # bytes
MOST_UNPACKED = 200 * 2**20  # of an archive, in bytes

Rule = tuple[str, list[bytes], re.Pattern[bytes]]  # kind, texts of which one must be there, expression
_STORES = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce", b"\x03\xd9\xa2\x9a")  # Java's keys, KeePass
_PACKED = re.compile(r".*\.(zip|whl|jar|egg|tar|t?gz|t?bz2|t?xz|zst|7z|rar)", re.IGNORECASE)
_UNPACK: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}  # by a file's first bytes
_PUBLIC = re.compile(rb"-----BEGIN (CERTIFICATE|PUBLIC KEY)-----")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Holds what was found: `certain` for a kind of credential; otherwise it is only worth a look."""

    kind: str
    where: str  # line, or member of an archive; empty if the name alone says it
    certain: bool = True


@cache
def _rules() -> tuple[list[Rule], list[Rule], list[tuple[re.Pattern[str], Rule]], re.Pattern[str]]:
    """Returns what credentials.yaml has: of tokens, of forms, of files of some names alone, and the names of stores."""
    table = read_yaml(Path(__file__).with_name("credentials.yaml"), "credentials.yaml")

    def rule(kind: str, texts: str, pattern: str) -> Rule:
        for name, part in table["parts"].items():
            pattern = pattern.replace(f"{{{name}}}", part)
        return kind, texts.encode().split(b"|"), re.compile(pattern.encode())

    # Of a token the start comes first, then whether a word begins with it: that is quick.
    tokens = [(kind, [start.encode()], re.compile(rf"{re.escape(start)}(?<!\w{re.escape(start)}){rest}".encode()))
              for kind, starts, rest in table["tokens"] for start in starts.split(" ")]  # fmt: skip
    of_files = [(re.compile(entry["names"]), rule(*entry["form"])) for entry in table["of_files"]]
    names = re.compile("|".join(table["names"]), re.IGNORECASE)
    return tokens, [rule(*form) for form in table["forms"]], of_files, names


def find_credential(path: Path) -> Finding | None:
    """Returns the first credential in a file or in an archive's members; else what is worth a look; None if nothing."""
    with path.open("rb") as file:
        finding, _ = _search(path.name, file)
    if finding:
        return finding
    unpacked, names = 0, list[str]()
    try:
        for name, stream in _members(path):
            names.append(name)
            finding, size = _search(Path(name).name, stream, MOST_UNPACKED - unpacked)
            unpacked += size
            if finding:
                return Finding(finding.kind, f"{name}{', ' * bool(finding.where)}{finding.where}")
            if unpacked >= MOST_UNPACKED:
                return Finding("an archive of which the beginning alone was read", "", certain=False)
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        return Finding(f"an archive that could not be read ({error})", "", certain=False)
    packed = [name for name in (names or [path.name]) if _PACKED.fullmatch(name)]
    return Finding("an archive that is not unpacked", packed[0] if names else "", certain=False) if packed else None


def _search(name: str, file: IO[bytes], most: int = 2**62) -> tuple[Finding | None, int]:
    """Returns what the first `most` bytes of a file hold, and how many were read."""
    (tokens, forms, of_files, stores), line, size, tail = _rules(), 1, 0, b""
    rules = [*forms, *(rule for names, rule in of_files if names.fullmatch(name.lower()))]
    by_name = bool(stores.fullmatch(name))
    while size < most and (read := file.read(_PIECE)):
        piece = tail + read
        if not size and piece.startswith(_STORES):
            return Finding("a key store", ""), size
        by_name = by_name and not _PUBLIC.search(piece)
        for text in (piece, piece.replace(b"\0", b"")) if b"\0" in piece else (piece,):  # then UTF-16, too
            lower = text.lower()
            chosen = [rule for rule in tokens if rule[1][0] in text]
            chosen += [rule for rule in rules if any(part in lower for part in rule[1])]
            for kind, _, pattern in chosen:
                if match := pattern.search(text):
                    start = match.end() - len(match[0].lstrip())
                    return Finding(kind, f"line {line + text.count(NEWLINE, 0, start)}"), size
        size, tail = size + len(read), piece[-_OVERLAP:]
        line += piece.count(NEWLINE, 0, len(piece) - len(tail))
    return (Finding("a credential by its name", "") if by_name else None), size


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields name and content of each file in an archive, or of a compressed file; nothing of another format."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    yield member.filename, stream
        return
    with contextlib.suppress(tarfile.ReadError), tarfile.open(path) as tar:
        for entry in tar:
            if content := tar.extractfile(entry):
                yield entry.name, content
        return
    with path.open("rb") as file:
        start = file.read(6)
    unpack = next((function for magic, function in _UNPACK.items() if start.startswith(magic)), None)
    if unpack:
        with unpack(path) as unzipped:
            yield path.stem.removesuffix(".tar"), unzipped
