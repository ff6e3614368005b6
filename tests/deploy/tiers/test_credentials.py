"""Tests that credentials of 40 kinds are found by their content, wherever they hide, and harmless files are not."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.tiers.credentials import find_credential
from deploy.tiers.sources import user_sources
from trainer.base.errors import UserError

X = "a1B2c3D4e5F6g7H8i9J0"  # 20 characters, repeated where a secret would be
HEX = "0a1b2c3d4e5f6789"
KEY = f"-----BEGIN PRIVATE KEY-----\nMII{X}\n-----END PRIVATE KEY-----\n"
KUBE = "apiVersion: v1\nkind: Config\ncurrent-context: a\nusers:\n- name: a\n  user:\n    {}\n"
CREDENTIALS = {
    "key.txt": KEY, "ssh.txt": KEY.replace("PRIVATE", "OPENSSH PRIVATE"),
    "pgp.asc": "-----BEGIN PGP PRIVATE KEY BLOCK-----", "putty.txt": "PuTTY-User-Key-File-3: ssh-ed25519",
    "age.txt": f"AGE-SECRET-KEY-1{'QZRY9X8GF2' * 5}", "sa.json": '{"x": 1, "type": "service_account"}',
    "adc.json": '{"type":  "authorized_user"}', "pool.json": '{"type": "external_account"}',
    "imp.json": '{"type": "impersonated_service_account"}', "token.json": json.dumps({"client_id": "x",
    "refresh_token": f"1//0{X}{X}"}), "cache.py": f"access_token = '{X}{X}'", "oauth.yaml": f"client_secret: {X}",
    "client.json": f"GOCSPX-{X}", "maps.js": f"key=AIza{X}{X[:15]}", "gcloud.log": f"Bearer ya29.{X}",
    "url.txt": f"https://x/y?a=b&X-Goog-Signature={HEX * 8}", "aws.txt": f"AKIA{'Q7' * 8}",
    "aws/credentials": f"aws_secret_access_key = {X}{X}", "azure.txt": f"AccountName=x;AccountKey={X * 4}==",
    "bus.txt": f"SharedAccessKey={X}{X}=", "sas.txt": f"?sv=1&sig={X}{X}%3D",
    "kubeconfig": KUBE.format(f"client-key-data: {X}"), "config": KUBE.format("token: abc"),
    "admin.conf": json.dumps({"users": [{"user": {"password": "abcd"}}], "current-context": "a"}),
    "docker/config.json": json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": "bWU6cHc="}}}, indent=1),
    "npmrc": f"//registry.npmjs.org/:_authToken={X}\n", "netrc_": "machine h.com\n  login me\n  password abc",
    "requirements.txt": "--index-url https://me:pa55@pypi.example.com/simple",
    "db.py": "URL = 'postgres://me:pw12@host/db'", "passwords": f"me:$apr1${X}",
    "kaggle.txt": json.dumps({"username": "me", "key": HEX * 2}),
    "wandb.sh": f"export WANDB_API_KEY={HEX * 2}{HEX[:8]}", "jwt.txt": f"eyJ{X}.eyJ{X}.{X}",
    "gh.py": f"ghp_{'a1' * 18}", "gl.py": f"glpat-{X}", "hf.py": f"hf_{'x' * 34}", "ai.py": f"sk-proj-{X}{X}",
    "slack.py": f"xoxb-{X}", "hook.py": f"https://hooks.slack.com/services/T01/B01/{X}",
    "bot.py": f"123456789:AA{X}{X[:13]}", "pay.py": f"sk_live_{X}", "mail.py": f"SG.{X}.{X}",
    "pypi.py": f"pypi-{X * 3}", "npm.py": f"npm_{'a1' * 18}", "hub.py": f"dckr_pat_{X}", "vault.py": f"hvs.{X}",
    "bricks.py": f"dapi{HEX * 2}", "do.py": f"dop_v1_{HEX * 4}", "terraform.tfvars": 'db_password = "abcd"',
    "stack.yaml": "db:\n  password: hunter2\n", "my.cnf": "[client]\npassword=hunter2",
    "pgpass": "localhost:5432:db:me:pw", "news.py": f"key = '{HEX * 2}-us12'", "phone.py": f"SK{HEX * 2}",
    "shop.py": f"sq0csp-{X}{X}", "art.py": f"AKC{'a1' * 35}", "chat.py": f"discord = 'M{X}{X[:4]}.abcdef.{X}{X[:8]}'",
}  # fmt: skip
HARMLESS = {
    "ca.txt": "-----BEGIN CERTIFICATE-----\nMII\n", "pub.txt": "-----BEGIN PUBLIC KEY-----",
    "id.txt": "ssh-ed25519 AAAAC3Nz me",
    "secrets.py": "def keyword(token: str, task: str = 'risk-analysis-of-a-portfolio-of-loans'): ...",
    "types.json": '{"type": "cnn"}', "login.py": "refresh_token = session.refresh_token_of(user)",
    "oauth.py": "client_secret = os.environ['CLIENT_SECRET']",
    "empty.json": '{"refresh_token": "", "access_token": null}', "aiza.txt": "AIza",
    "arn.txt": "arn:aws:iam::123456789012:user/x",
    "env.sh": "export AWS_SECRET_ACCESS_KEY=$SECRET",
    "kube.yaml": KUBE.format("exec: {command: gke-gcloud-auth-plugin}"), "docker.json": json.dumps({"auths": {},
    "credsStore": "desktop"}), "npm.txt": "//registry.npmjs.org/:_authToken=${NPM_TOKEN}",
    "machine.md": "Every machine that has a password is listed.",
    "requirements.txt": "git+https://${TOKEN}@github.com/me/x\nnumpy\n",
    "ssh.md": "git clone ssh://git@github.com:22/x", "url.md": "https://example.com:8080/a@b",
    "tok.yaml": "pad_token: <pad>\ntoken: word\n", "vocab.txt": "password\npasswd\nsecret\ntoken\n",
    "layer.py": "self._auth = HTTPBasicAuth(user, password)", "mask.py": "task-mask-token",
    "hf.md": "hf_hub_download(repo_id, filename)", "sk.py": "from sklearn import sk_learn_of_everything_that_is_long",
    "sg.md": "SG.x.y", "table.csv": "user,password_changed\n1,2020-01-01\n",
    "conf.ini": "[a]\npassword =\ntoken = ${TOKEN}\n", "v.tfvars": "password_length = 12\n",
    "compose.yaml": "password: ${PASSWORD}\n", "hash.py": "SHA = 'e3b0c44298fc'", "p.py": "password = getpass()",
    "x.toml": "tokenizer = 'bert'", "a.json": '{"username": "me", "keys": 3}', "b.json": '{"password": ""}',
    "time.txt": "12:34:56:78", "rows.csv": "1,2,3\n" * 1000, "eyj.txt": "eyJ", "pypi.md": "pypi-server",
    "npm_.py": "npm_install_all()", "dapi.md": "the dapi of x", "empty": "", "m.bin": "\x00\x01\x02" * 999,
}  # fmt: skip


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", CREDENTIALS)
def test_a_credential_is_found_by_its_content(name: str, tmp_path: Path) -> None:
    finding = find_credential(write(tmp_path / name, f"\n\n{CREDENTIALS[name]}"))
    assert finding.certain
    assert int(finding.where.removeprefix("line ")) >= 3


def test_harmless_files_go_along(tmp_path: Path) -> None:
    assert (len(CREDENTIALS) >= 40, len(HARMLESS) >= 40) == (True, True)
    for name, content in {**HARMLESS, "mine/__init__.py": ""}.items():
        write(tmp_path / "mine" / name, content)
    assert user_sources(tmp_path / "mine").doubtful == ()


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def inside(kind: str) -> bytes:
    """Returns an archive with a token in its second file."""
    files, buffer, token = {"a.txt": b"x", "deep/b.txt": b"\n" + CREDENTIALS["token.json"].encode()}, io.BytesIO(), ""
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    elif kind in PACKERS:
        return PACKERS[kind](files["deep/b.txt"])
    else:
        with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue() + token.encode()


@pytest.mark.parametrize(("content", "where"), [
    (b"x\n" * 2_500_000 + KEY.encode(), "line 2500001"), (("x\n" + KEY).encode("utf-16"), "line 2"),
    (("x\n" + KEY).encode("utf-16-be"), "line 2"), (b"\xff\xd8\0\0" + b"\0" * 4_194_290 + KEY.encode(), "line 1"),
    (inside("zip"), "deep/b.txt, line 2"), (inside("tar"), "deep/b.txt, line 2"),
    *((inside(kind), "photo, line 2") for kind in PACKERS),
], ids=["late", "utf-16", "utf-16-be", "jpeg", "zip", "tar", *PACKERS])  # fmt: skip
def test_it_is_found_wherever_it_hides(content: bytes, where: str, tmp_path: Path) -> None:
    """Behind the first megabytes, across two pieces, in UTF-16, in an archive; whatever the name's ending."""
    finding = find_credential(write(tmp_path / "photo.jpg", content))
    assert (finding.where, finding.certain) == (where, True)


def test_a_damaged_archive_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder / "__init__.py", "")
    write(folder / "cut.zip", inside("zip")[:-30])
    write(folder / "cut.tgz", gzip.compress(b"x" * 999)[:-9])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/inner.whl", inside("zip"))
    write(folder / "box.zip", buffer.getvalue())
    write(folder / "read.tar.gz", gzip.compress(b"plain text"))
    write(folder / "closed.rar", "Rar!")
    about = "; ".join(user_sources(folder).doubtful)
    assert "mine/box.zip, a/inner.whl (an archive that is not unpacked)" in about
    assert "mine/closed.rar (an archive that is not unpacked)" in about
    assert "tar.gz" not in about
    assert "mine/cut.tgz (an archive that could not be read" in about


def test_one_file_is_allowed_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine" / "data" / "token.json", CREDENTIALS["token.json"]).parents[1]
    write(folder / "other.json", "{}")
    with pytest.raises(UserError) as caught:
        user_sources(folder)
    (_, _, line) = str(caught.value).partition("If it is harmless: a line ")
    write(folder / ".gcloudignore", f"{line.split()[0]}\n")
    assert len(user_sources(folder).files) == 2
    write(folder / "other.json", CREDENTIALS["sa.json"])
    with pytest.raises(UserError, match=r"mine/other.json, line 1 looks like a service account's key"):
        user_sources(folder)
