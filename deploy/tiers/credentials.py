"""Finds credentials in files by their content: every byte, UTF-16 too, and what is in archives.

The rules are for kinds that scanners miss; detect-secrets, which knows some services more, reads code and
configuration beside them. It verifies nothing over the network: only its expressions are used.
"""

import contextlib
import dataclasses
import gzip
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

NEWLINE = b"\n"
_PIECE, _OVERLAP = 4 * 2**20, 4096  # bytes
MOST_UNPACKED = 200 * 2**20  # of an archive, in bytes
_TEXT_BYTES = 2**20  # the largest file that detect-secrets reads

_BARE = r"""["']?\s*[:=]\s*["']?(?=[\w./+~=-]*\d)"""  # between a key and a value with a digit, quoted or not
# Each kind: how its values begin, and how they go on.
_TOKENS = [
    ("a PuTTY key", "PuTTY-User-Key-File-", r"\d"),
    ("an age key", "AGE-SECRET-KEY-1", r"[0-9A-Z]{50}"),
    ("an OAuth client's secret", "GOCSPX-", r"[\w-]{20,}"),
    ("a Google API key", "AIza", r"[\w-]{35}"),
    ("a Google access token", "ya29.", r"[\w-]{20,}"),
    ("a signed address", "X-Goog-Signature= X-Amz-Signature=", r"[0-9a-f]{60,}"),
    ("an Azure signature", "sig=", r"[\w%+/]{40,}"),
    ("an Azure access key", "AccountKey= SharedAccessKey=", r"[A-Za-z0-9+/=]{40,}"),
    ("an AWS key", "AKIA ASIA", r"[0-9A-Z]{16}\b"),
    ("a web token", "eyJ", r"[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    ("a GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"\w{36}"),
    ("a GitLab token", "glpat-", r"[\w-]{20}"),
    ("a Hugging Face token", "hf_", r"[A-Za-z]{30,}"),
    ("an OpenAI or Anthropic key", "sk-", r"[\w-]{32,}"),
    ("a Groq or Replicate key", "gsk_ r8_", r"\w{37,}"),
    ("a Slack token", "xoxa- xoxb- xoxe- xoxp- xoxr- xoxs-", r"[\w-]{10,}"),
    ("a Slack webhook", "hooks.slack.com/services/", r"T\w+/B\w+/\w{20,}"),
    ("a Telegram token", "AA", r"(?<=\d{8}:AA)[\w-]{33}\b"),
    ("a Stripe key", "sk_live_ rk_live_", r"[0-9A-Za-z]{20,}"),
    ("a SendGrid key", "SG.", r"[\w-]{20,}\.[\w-]{20,}"),
    ("a PyPI token", "pypi-", r"[\w-]{50,}"),
    ("an npm token", "npm_", r"[A-Za-z0-9]{36}"),
    ("a Docker Hub token", "dckr_pat_", r"[\w-]{20,}"),
    ("a Vault token", "hvs.", r"[\w-]{20,}"),
    ("a Databricks token", "dapi", r"[0-9a-f]{32}"),
    ("a DigitalOcean token", "dop_v1_", r"[0-9a-f]{64}"),
    ("a Grafana token", "glsa_", r"\w{32,}"),
    ("an Atlassian token", "ATATT3", r"[\w=-]{50,}"),
]
# Each kind: texts of which one must be there, in small letters, and the expression.
_FORMS = [
    ("a private key", "private key", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----"),
    ("a service account's key", '"service_account"', r'"type"\s*:\s*"service_account"'),
    ("credentials of a user of Google Cloud", '"authorized_user"', r'"type"\s*:\s*"authorized_user"'),
    ("credentials of an external account", '"external_account', r'"type"\s*:\s*"external_account'),
    ("credentials of an impersonated account", '"impersonated_', r'"type"\s*:\s*"impersonated_service_account"'),
    ("an OAuth refresh token", "refresh_token", rf"refresh_token{_BARE}[\w./+~-]{{20,}}"),
    ("an OAuth access token", "access_token", rf"access_token{_BARE}[\w./+~-]{{20,}}"),
    ("an OAuth client's secret", "client_secret", rf"client_secret{_BARE}[\w~.-]{{16,}}"),
    ("an AWS secret key", "secret_access_key|secretaccesskey", rf"(?i)secret_?access_?key{_BARE}[a-z0-9/+=]{{40}}"),
    ("a key of Kubernetes", "client-key-data", rf"client-key-data{_BARE}[A-Za-z0-9+/=]{{20,}}"),
    ("a kubeconfig with a login", "current-context", r"""(?s)current-context.{1,4000}?\b(token|password)"""
     r"""["']?: *["']?[^\s"']|\b(token|password)["']?: *["']?[^\s"'].{1,4000}?current-context"""),
    ("a Docker login", '"auths"', r'(?s)"auths".{1,300}?"(auth|identitytoken)"\s*:\s*"[\w+/=.-]{6,}"'),
    ("an npm login", "_auth|_password", r"(?m)_(?<![^\n:]_)(authToken|password|auth)\s*=\s*[\w+/=-]{8,}\s*$"),
    ("a netrc login", "machine ", r"machine\s+\S+\s+login\s+\S+\s+(account\s+\S+\s+)?password\s+\S+"),
    ("a password in an address", "://", r"""://[^\s:/@"'$<{%]{1,80}:[^\s/@"'$<{%]{2,200}@[\w\[]"""),
    ("a password's hash", ":$apr1$|:$2a$|:$2b$|:$2y$|:$1$|:$5$|:$6$|:{sha}",
     r":(\$(apr1|2[aby]|[156])\$|\{SHA\})\S{20,}"),
    ("a Kaggle key", '"username"', r'"username"\s*:\s*"[^"]+"\s*,\s*"key"\s*:\s*"[0-9a-f]{32}"'),
    ("a key of Weights & Biases", "wandb_api_key", rf"(?i)wandb_api_key{_BARE}[0-9a-f]{{40}}"),
]  # fmt: skip
Rule = tuple[str, list[bytes], re.Pattern[bytes]]  # kind, texts of which one must be there, expression
_TOKEN_RULES: list[Rule] = [  # the start comes first, then whether a word begins with it: that is quick
    (kind, [start.encode()], re.compile(rf"{re.escape(start)}(?<!\w{re.escape(start)}){rest}".encode()))
    for kind, starts, rest in _TOKENS for start in starts.split(" ")
]  # fmt: skip
_RULES: list[Rule] = [(kind, texts.encode().split(b"|"), re.compile(form.encode())) for kind, texts, form in _FORMS]


def _assigned(words: str) -> Rule:
    """Returns the rule for a key of a configuration that ends in one of the words and has a value."""
    pattern = rf"""(?im)(?:^|[{{,\s])["']?[\w.-]*({words})["']?[^\S\n]*[=:][^\S\n]*["']?[^\s"'$<{{%(\[,]{{4,}}"""
    return "a password in a configuration", words.encode().split(b"|"), re.compile(pattern.encode())


_IN_FILES = {  # rules for some names of files: elsewhere such lines are code
    re.compile(r".*\.(tfvars|tfstate|ini|cfg|cnf|conf|properties|env|boto)(\.json|\.backup)?|\.?(pypirc|boto)"):
        _assigned("password|passwd|secret|api_key|token|pass"),
    re.compile(r".*\.(ya?ml|toml|json)"): _assigned("password|passwd"),
    re.compile(r"\.?pgpass(\.conf)?"):
        ("a password of PostgreSQL", [b":"], re.compile(rb"(?m)^[^\s:#]+:(\d+|\*):[^:\n]+:[^:\n]+:\S+")),
}  # fmt: skip
_STORES = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce", b"\x03\xd9\xa2\x9a")  # Java's keys, KeePass
_NAMES = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|ppk|kdbx|p8|env)|id_(rsa|dsa|ecdsa|ed25519).*|env|kaggle\.json"
    r"|.*(credential|client_?secret|service[_-]?account|secret).*\.(json|ya?ml|txt|ini|toml|cfg|csv)|htpasswd|netrc",
    re.IGNORECASE,
)
_PUBLIC = re.compile(rb"-----BEGIN (CERTIFICATE|PUBLIC KEY)-----")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Holds what was found: `certain` for a kind of credential; otherwise it is only worth a look."""

    kind: str
    where: str  # line, or member of an archive; empty if the name alone says it
    certain: bool = True


def find_credential(path: Path) -> Finding | None:
    """Returns the first credential in a file or in an archive's members; else what is worth a look; None if nothing."""
    with path.open("rb") as file:
        finding, _ = _search(path.name, file)
    if finding:
        return finding
    unpacked = 0
    try:
        for name, stream in _members(path):
            finding, size = _search(Path(name).name, stream, MOST_UNPACKED - unpacked)
            unpacked += size
            if finding:
                return Finding(finding.kind, f"{name}{', ' * bool(finding.where)}{finding.where}")
            if unpacked >= MOST_UNPACKED:
                return Finding("an archive of which the beginning alone was read", "", certain=False)
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        return Finding(f"an archive that could not be read ({error})", "", certain=False)
    return None


def _search(name: str, file: IO[bytes], most: int = 2**62) -> tuple[Finding | None, int]:
    """Returns what the first `most` bytes of a file hold, and how many were read."""
    rules = [*_RULES, *(rule for names, rule in _IN_FILES.items() if names.fullmatch(name.lower()))]
    by_name, line, size, tail = bool(_NAMES.fullmatch(name)), 1, 0, b""
    while size < most and (read := file.read(_PIECE)):
        piece = tail + read
        if not size and piece.startswith(_STORES):
            return Finding("a key store", ""), size
        by_name = by_name and not _PUBLIC.search(piece)
        for text in (piece, piece.replace(b"\0", b"")) if b"\0" in piece else (piece,):  # then UTF-16, too
            lower = text.lower()
            chosen = [rule for rule in _TOKEN_RULES if rule[1][0] in text]
            chosen += [rule for rule in rules if any(part in lower for part in rule[1])]
            for kind, _, pattern in chosen:
                if match := pattern.search(text):
                    start = match.end() - len(match[0].lstrip())
                    return Finding(kind, f"line {line + text.count(NEWLINE, 0, start)}"), size
        size, tail = size + len(read), piece[-_OVERLAP:]
        line += piece.count(NEWLINE, 0, len(piece) - len(tail))
    return (Finding("a credential by its name", "") if by_name else None), size


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and content of each file in an archive, or of a compressed file; nothing of others."""
    with path.open("rb") as file:
        start = file.read(512)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    yield member.filename, stream
    elif start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ")) or start[257:262] == b"ustar":
        with contextlib.suppress(tarfile.ReadError), tarfile.open(path) as tar:
            for entry in tar:
                if content := tar.extractfile(entry):
                    yield entry.name, content
            return
        if start.startswith(b"\x1f\x8b"):
            with gzip.open(path) as unzipped:
                yield path.stem, cast(IO[bytes], unzipped)


@cache
def _detectors() -> tuple[list[Any], list[Any]]:
    """Returns detect-secrets' detectors of named kinds, and those of random text; nothing if it is not installed."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError:
        return [], []
    kinds: dict[str, Any] = get_mapping_from_secret_type_to_class()
    by_name = {detector.__name__: detector for detector in kinds.values()}
    random = [by_name.pop(f"{base}HighEntropyString")() for base in ("Hex", "Base64")]
    slow = ("KeywordDetector", "IPPublicDetector")  # and what they find is mostly no credential
    return [detector() for name, detector in by_name.items() if name not in slow], random


def scanner_is_installed() -> bool:
    """Returns whether detect-secrets is there."""
    return bool(_detectors()[0])


def scan_text(path: Path) -> Finding | None:
    """Returns what detect-secrets finds in a small text file: a kind it names, or a random text."""
    content = path.read_bytes() if path.stat().st_size <= _TEXT_BYTES else b"\0"
    if b"\0" in content:
        return None
    text = content.decode("utf-8", "replace")
    named, random = _detectors()
    for detector in named:
        for secret in detector.analyze_string(text):
            return Finding(f"a credential ({detector.secret_type})", _line(text, secret))
    for detector in random:
        for secret in detector.analyze_string(text):
            if len(secret) >= 20 and detector.calculate_shannon_entropy(secret) > detector.entropy_limit:
                return Finding("a random text", _line(text, secret), certain=False)
    return None


def _line(text: str, part: str) -> str:
    return f"line {text.count(chr(10), 0, text.index(part)) + 1}"
