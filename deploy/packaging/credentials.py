"""Finds credentials in the files that a job would get.

A file with the name of a credential counts as one. Text, also in UTF-16, in a .gz file and in a
notebook, is scanned by detect-secrets, with all its detectors and filters and without its checks
over the network; some expressions find what it misses. Placeholders, words, references and
checksums are no credentials.
"""

import codecs
import gzip
import json
import re
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.base.errors import UserError

ALLOWED = "pragma: allowlist secret"  # in a line whose author knows that it holds none
# bytes of a large file that are looked through at a time, and again
_BLOCK = 2**20
_OVERLAP = 2**12
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

# What detect-secrets misses: without quotes, in a call, or in a binary file.
_EXPRESSIONS = {
    "a private key": (
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----(?![`\"'])|PuTTY-User-Key-File-\d"
        r"|AGE-SECRET-KEY-1[0-9A-Z]{50}"
    ),
    "a token of a service": (
        r"(?<![\w-])(ya29\.|GOCSPX-|AIza|gh[oprsu]_|github_pat_|glpat-|hf_|npm_(?=\w{36})|dckr_pat_"
        r"|hvs\.|dapi(?=[0-9a-f]{32})|dop_v1_|glsa_|ATATT3|gsk_|r8_(?=\w{37})|sk-|sk_live_|SG\.|pcsk_)"
        r"(?P<value>[\w.=-]{20,})"
    ),
    "a token of the web": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}",
    "a random argument": (
        r"\w\(\s*[\"'](?P<value>(?=[\w-]*\d)(?=[\w-]*[a-z])(?=[\w-]*[A-Z])[\w-]{32,128})[\"']\s*[,)]"
    ),
    "a signed address": (
        r"(X-Goog-Signature|X-Amz-Signature|[?&]sig)=[\w%+/]{32,}|/webhooks/\d+/[\w-]{30,}"
        r"|://(?=[\w-]*\d)[\w-]{20,}@[\w\[]"
    ),
    "a login in an address": r"\w://[^\s:/@'\"]*:(?P<value>[^\s:/@'\"]{4,})@",
    "a value that is called a secret": (
        r"(?i)(?<![:/])(key(-data)?|token|secret|auth)([\"']?[ \t]*[:=]|[\"'],)"
        r"[ \t]*[\"']?(?P<value>(?=[\w./+~=-]*\d)(?=[\w./+~=-]*[a-z])[\w./+~=-]{12,})"
    ),
    "a password": (
        r"(?i)(passw(or)?d|_pass|\bpass|\bpwd)([\"']?[ \t]*[:=]|[\"'],|>)"
        r"[ \t]*[\"']?(?P<value>(?=[^\s\"';,<]*\d)[^\s\"';,<(){}\[\]]{8,})"
    ),
    "the header of a login": r"(?i)\b(bearer|basic)[ ]+(?=[\w.~+/-]*\d)[\w.~+/-]{20,}",
    "a login": (
        r"\bmachine\s+\S+\s+login\s+\S+\s+(account\s+\S+\s+)?password\s+\S|\bPGPASSWORD=['\"]?\w"
        r"|--password=\w|\bcurl\b.* -u [\"']?[\w.-]+:(?P<value>[^\s\"'$]{6,})"
    ),
}
# not looked for in other files
_OF_TEXT = ("a random argument", "a password", "the header of a login", "a login")
_PATTERNS = {kind: re.compile(expression) for kind, expression in _EXPRESSIONS.items()}

# Values that are no credential: placeholders, as on Amazon's pages, and under a name or by their
# letters alone also references, and names in words.
_PLACEHOLDER = re.compile(
    r"(?i).*(your|example|change.?me|placeholder|redacted|dummy|_here\b|xxxx).*|([<$~{%]|enc\[).*|(null|none|true|false)?"
)
_REFERENCE = re.compile(r"(?i)(gs://|https?://|/|\./|projects/|arn:|sha256|ssh-).*|.*[\s(].*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")  # without quotes a name in code
_WORDS = re.compile(r"[A-Z]?[a-z]+([ _.-]?[a-z]+)*|[A-Z]+(_[A-Z]+)*|[\w-]*-key")
_SECRET_NAME = re.compile(r"(?i)key|token(?!s|iz|_type)|secret|passw|auth(?!or)|credential|login")
# what an expression above finds with fewer mistakes
_OURS = ("Private Key", "Basic Auth Credentials")
# a name that makes it no secret
_OPEN_NAME = re.compile(r"(?i)public|cache|hash|digest|encrypted(?! pass)|state_dict")
_CHECKSUM = re.compile(r"(?i)sha|md5|hash|digest|checksum|commit|etag|integrity|revision")
# Variables whose values are secret, whatever they are.
_SECRET_VARIABLE = re.compile(
    r"(?i)(secret|password|passwd|passphrase|token|credentials?|(api|private|access)_?key)(_|$)"
)


def refuse_secret(flag: str, name: str, value: str, *, by_name: bool = True) -> None:
    """Raises UserError for a value of a job's spec that is a secret: all who see the job can read
    it.

    by_name: whether a name such as HF_TOKEN is enough, as that of a variable.
    """
    if (by_name and _SECRET_VARIABLE.search(name)) or secrets_in(
        f'{name} = "{value}"', "", as_text=False
    ):
        variable = re.sub(r"\W", "_", name).upper()
        raise UserError(
            f"{flag}: this would stand in the job's spec, which all who see the job can read: store"
            " it in Secret Manager, and use"
            f" --secret={variable}=projects/P/secrets/S/versions/latest, a variable of the program"
        )


def find_credentials(path: Path, *, as_text: bool = True) -> Iterator[str]:
    """Yields a description of each credential in a file: its line and its kind.

    `as_text`: whether detect-secrets scans the file, if it is text. Raises UserError if it is not
        installed.
    """
    with path.open("rb") as file:
        content = file.read(_BLOCK)
        if _NAMES.fullmatch(path.name) and not _PUBLIC.search(content):
            yield "a credential by its name"
            return
        name = path.name
        kinds = dict[int, str]()
        lines_before = 0
        end = ""
        if name.endswith(".gz"):
            with suppress(OSError, EOFError, zlib.error), gzip.open(path) as unpacked:
                content = unpacked.read(_BLOCK)
            name = name.removesuffix(".gz")
        else:
            # A large file is looked through in blocks, each with the end of the one before.
            while len(content) == _BLOCK:
                text = end + content.decode("latin-1")
                for line, kind in secrets_in(text, "", as_text=False):
                    kinds[lines_before + line] = kind
                end = text[-_OVERLAP:]
                lines_before += text.count("\n") - end.count("\n")
                content = file.read(_BLOCK)
            if end:
                content = end.encode("latin-1") + content
                as_text = False
        # What is left is scanned as text, of a notebook only what its cells say.
        is_wide = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        text = content.decode("utf-16" if is_wide else "utf-8", "replace")
        if name.endswith(".ipynb"):
            text = _of_notebook(text)
            name = "notebook.py"
        for line, kind in secrets_in(text, name, as_text=as_text):
            kinds[lines_before + line] = kind
    yield from (f"line {number} ({kind})" for number, kind in sorted(kinds.items()))


def secrets_in(text: str, name: str, *, as_text: bool = True) -> list[tuple[int, str]]:
    """Returns the line and the kind of each secret in a text.

    `name`: that of a file, which says how it quotes; `as_text`: whether detect-secrets scans
        it, too. Raises UserError if that is not installed.
    """
    kinds = dict[int, str]()
    lines = text.split("\n")  # as detect-secrets counts them
    # What the expressions above find; in a binary file, what text alone could show is left out.
    for kind, pattern in _PATTERNS.items():
        if "\0" in text and kind in _OF_TEXT:
            continue
        for match in pattern.finditer(text):
            number = 1 + text.count("\n", 0, match.start())
            value = match.groupdict().get("value") or ""
            if not (value and _is_harmless(value, lines[number - 1].partition(value)[0])):
                kinds.setdefault(number, kind)
    # What detect-secrets finds, whose guesses by keyword or randomness are checked once more.
    if as_text and len(text) <= TEXT_BYTES and "\0" not in text:
        try:
            from detect_secrets.core.scan import scan_file
            from detect_secrets.settings import default_settings
        except ImportError:
            raise UserError(
                "package: detect-secrets, which looks for credentials, is not installed: pip"
                " install detect-secrets"
            ) from None
        with tempfile.TemporaryDirectory() as folder, default_settings():
            file = Path(folder, name)
            file.write_text(text, encoding="utf-8", newline="")
            for secret in scan_file(str(file)):
                value = secret.secret_value or ""
                line = lines[secret.line_number - 1]
                random = "High Entropy" in secret.type
                if random or secret.type == "Secret Keyword":
                    harmless = _is_harmless(value, line.partition(value)[0])
                    harmless |= random and bool(
                        _CHECKSUM.search(line) or not _SECRET_NAME.search(line)
                    )
                else:
                    harmless = secret.type in _OURS or bool(_PLACEHOLDER.fullmatch(value))
                if not harmless:
                    kinds.setdefault(secret.line_number, secret.type)
    return sorted(entry for entry in kinds.items() if ALLOWED not in lines[entry[0] - 1])


def _is_harmless(value: str, prefix: str) -> bool:
    """Returns whether a value is no secret; `prefix`: its line up to it, with its name."""
    rules = [_PLACEHOLDER, _REFERENCE, _WORDS, *([] if prefix[-1:] in ("'", '"') else [_DOTTED])]
    return any(rule.fullmatch(value) for rule in rules) or bool(_OPEN_NAME.search(prefix))


def _of_notebook(text: str) -> str:
    """Returns what cells of a notebook say and have printed, without pictures; all of a file that
    is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        texts = ["".join(cell.get("source", "")) for cell in cells]
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            data = output.get("data", {})
            parts = (
                output.get("text", ""),
                output.get("traceback", ""),
                data.get("text/plain", ""),
                data.get("text/html", ""),
            )
            for part in parts:
                texts.append("\n".join(part) if isinstance(part, list) else part)
        return "\n".join(texts)
    except (ValueError, KeyError, TypeError, AttributeError):
        return text
