"""Finds credentials in the files that a job would get.

A file with the name of a credential counts as one. Text is scanned by detect-secrets, with all its detectors and
filters and without its checks over the network; six expressions find what it misses, in text and binary files. Its
findings that are empty, prose, a reference or a checksum are dropped.
"""

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from trainer.base.errors import UserError

TEXT_BYTES = 2**18  # the largest text that detect-secrets reads: it takes some 0.2 ms a line

_NAMES = re.compile(
    r".*\.(pem|key|p12|pfx|jks|keystore|ppk|kdbx|p8|env|tfstate)"
    r"|id_(rsa|dsa|ecdsa|ed25519)(?!.*\.pub$).*"
    r"|\.?(netrc|pgpass|npmrc|pypirc|boto|htpasswd|git-credentials|env)|\.env\..*"
    r"|kubeconfig|kaggle\.json|cookies\.txt|credentials"
    r"|(.*[._-])?(.*credentials?|client_?secret.*|service[_-]?account.*|secrets?)\.(json|ya?ml|txt|ini|toml|cfg|csv)",
    re.IGNORECASE,
)
_PUBLIC = re.compile(rb"-----BEGIN (CERTIFICATE|[A-Z ]*PUBLIC KEY)-----")

# What detect-secrets misses.
_EXPRESSIONS = {
    "a private key": rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-\d"
    rb"|AGE-SECRET-KEY-1[0-9A-Z]{50}",
    "a token of a service": rb"\b(ya29\.|GOCSPX-|AIza|gh[oprsu]_|github_pat_|glpat-|hf_(?=[A-Za-z]{30})"
    rb"|npm_(?=\w{36})|dckr_pat_|hvs\.|dapi(?=[0-9a-f]{32})|dop_v1_|glsa_|ATATT3|gsk_|r8_(?=\w{37})|sk-)[\w=-]{20,}",
    "a signed address": rb"(X-Goog-Signature|X-Amz-Signature|[?&]sig)=[\w%+/]{32,}|/webhooks/\d+/[\w-]{30,}"
    rb"|://(?=[\w-]*\d)[\w-]{20,}@[\w\[]",
    "a token": rb"(?i)(token|client-key-data|identitytoken|\"auth|_auth|refresh_token)[\"']?[ \t]*[:=]"
    rb"[ \t]*[\"']?(?=[\w./+~=-]*\d)[\w./+~=-]{12,}",
    "the header of a login": rb"(?i)\b(bearer|basic)[ ]+(?=[\w.~+/-]*\d)[\w.~+/-]{20,}",
    "a login": rb"\bmachine\s+\S+\s+login\s+\S+\s+(account\s+\S+\s+)?password\s+\S|\bPGPASSWORD=['\"]?\w|--password=\w",
}
_PATTERNS = {kind: re.compile(expression) for kind, expression in _EXPRESSIONS.items()}

# What detect-secrets reports although it is no credential: some values, and checksums, which look random.
_HARMLESS = re.compile(
    r"(?i)(null|none|true|false|~|password|passwd|secret|token|your[_-].*|projects/.*)?|.*\s.*|[\w-]*-key"
)
_CHECKSUM = re.compile(r"(?i)sha|md5|hash|digest|checksum|commit|etag|integrity|revision")


def find_credentials(path: Path, *, as_text: bool = True) -> Iterator[str]:
    """Yields a description of each credential in a file: its line and its kind.

    `as_text`: whether detect-secrets scans the file, if it is text. Raises UserError if it is not installed.
    """
    lines = dict[int, str]()
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        if _NAMES.fullmatch(path.name) and not _PUBLIC.search(content):
            yield "a credential by its name"
            return
        for kind, pattern in _PATTERNS.items():
            for match in pattern.finditer(content):
                lines.setdefault(1 + content[: match.start()].count(b"\n"), kind)
        as_text = as_text and len(content) <= TEXT_BYTES and b"\0" not in content[:]
    if as_text:
        try:
            from detect_secrets.core.scan import scan_file
            from detect_secrets.settings import default_settings
        except ImportError:
            raise UserError(
                "package: detect-secrets, which looks for credentials, is not installed: pip install detect-secrets"
            ) from None
        text = path.read_text(encoding="utf-8", errors="replace").split("\n")  # as detect-secrets counts lines
        with default_settings():
            for secret in scan_file(str(path)):
                harmless = secret.type == "Secret Keyword" and _HARMLESS.fullmatch(secret.secret_value or "")
                checksum = "High Entropy" in secret.type and _CHECKSUM.search(text[secret.line_number - 1])
                if not harmless and not checksum:
                    lines.setdefault(secret.line_number, secret.type)
    for number, kind in sorted(lines.items()):
        yield f"line {number} ({kind})"
