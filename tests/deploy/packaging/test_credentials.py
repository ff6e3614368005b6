"""Tests that credentials are found by name and by content, and that harmless files are not taken
for them."""

import json
import subprocess
from pathlib import Path

import pytest

from deploy.cli import submit
from deploy.packaging.credentials import find_credentials
from deploy.packaging.sources import user_sources
from deploy.tiers.tier import JOB_CONFIGS
from tests.deploy.conftest import JOB, WHERE, Command, error_of
from tests.deploy.packaging.drawn_secrets import INNOCENT, SECRETS, drawn

X = "a1B2c3D4e5F6g7H8i9J0"
HEX = "0a1b2c3d4e5f6789"
KEY = f"-----BEGIN PRIVATE KEY-----\nMII{X}\n-----END PRIVATE KEY-----\n"
KUBE = "apiVersion: v1\nkind: Config\ncurrent-context: a\nusers:\n- name: a\n  user:\n    {}\n"
BY_NAME = """
id_rsa id_ed25519.bak server.pem tls.key store.p12 keys.jks my.kdbx me.ppk AuthKey.p8 .netrc
netrc .pgpass .npmrc .pypirc .htpasswd kubeconfig .env prod.env .env.local service-account.json
client_secret_1.apps.json application_default_credentials.json credentials.json credentials
cookies.txt kaggle.json secrets.yaml terraform.tfstate .boto .git-credentials
"""
BY_CONTENT = {
    "pgp.asc": "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    "putty.txt": "PuTTY-User-Key-File-3: ssh-ed25519",
    "sa.txt": json.dumps({"type": "service_account", "private_key": KEY}),
    "adc.json": json.dumps(
        {
            "client_id": "x",
            "client_secret": f"d-{X}",
            "refresh_token": f"1//0{X}{X}",
            "type": "authorized_user",
        },
        indent=1,
    ),
    "cache.py": f"access_token = '{X}{X}'",
    "oauth.yaml": f"client_secret: {X}",
    "kube.yaml": KUBE.format("token: abcd1234efgh"),
    "kube2.yaml": KUBE.format("client-key-data: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVk"),
    "docker.json": json.dumps(
        {"auths": {"https://index.docker.io/v1/": {"auth": "bWU6cHdhYmNkZWZnaA=="}}}, indent=1
    ),
    "npm.txt": f"//registry.npmjs.org/:_authToken={X}",
    "login.txt": "machine h.com\n  login me\n  password abc",
    "requirements.txt": "--index-url https://me:pa55word@pypi.example.com/simple",
    "settings.py": 'DB_PASSWORD = "hunter2-horse"',
    "mlflow.sh": "export MLFLOW_TRACKING_PASSWORD=hunter2horse",
    "gh.py": f"T = 'ghp_{'a1' * 18}'",
    "gl.py": f"T = 'glpat-{X}'",
    "ai.py": f"K = 'sk-proj-{X}{X}'",
    "bot.py": f"T = '110201543:AA{X}{X[:13]}'",
    "vault.py": f"T = 'hvs.{X}{X}'",
    "bricks.py": f"T = 'dapi{HEX * 2}'",
    "v.tfvars": 'db_password = "abcdhunter2"',
    "stack.yaml": "db:\n  password: hunter2\n",
    "my.cnf": "[client]\npassword=hunter2",
    "api.yaml": f"service:\n  api_key: {X}\n",
    "tool.toml": f'[upload]\ntoken = "{X}{X}"\n',
    "plain.toml": 'token = "correct-horse-9"\n',
    "git.sh": f"git clone https://{X}{X}@github.com/me/x",
    "curl.sh": f"curl -H 'Authorization: Bearer {X}{X}' https://x",
    "conf.json": json.dumps({"password": "hunter2horse"}, indent=1),
    "app.properties": "spring.datasource.password=hunter2horse",
    "compose.yaml": "environment:\n  - POSTGRES_PASSWORD=hunter2horse\n",
    "hub2.py": f"login(token='{X}{X}')",
    "conn.py": 'connect(host="h", user="me", password="s3cr3t-pw")',
}
HARMLESS: dict[str, str | bytes] = {
    "id_rsa.pub": "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQC7 me@host",
    "ca.crt": "-----BEGIN CERTIFICATE-----\nMII\n",
    "secrets.py": (
        "def keyword(token: str, task: str = 'risk-analysis-of-a-portfolio-of-loans'): ..."
    ),
    "secret_santa.py": "PAIRS = []",
    "types.json": '{"type": "cnn"}',
    "login.py": "refresh_token = session.refresh_token_of(user)",
    "empty.json": '{"refresh_token": "", "access_token": null}',
    "none.py": "password = None\n",
    "null.yaml": "password: null\n",
    "env.sh": "export AWS_SECRET_ACCESS_KEY=$SECRET",
    "env3.sh": "export TOKEN=$(gcloud auth print-access-token)",
    "kube.yaml": KUBE.format("exec: {command: gke-gcloud-auth-plugin}"),
    "docker.json": json.dumps({"auths": {}, "credsStore": "desktop"}),
    "npm.txt": "//registry.npmjs.org/:_authToken=${NPM_TOKEN}",
    "requirements.txt": "git+https://${TOKEN}@github.com/me/x\nnumpy==2.1\n",
    "tok.yaml": "pad_token: <pad>\ntoken: word\nmax_tokens: 2048\n",
    "audio.py": "lowpass = 8000\nbypass = 'filter'\n",
    "fstr.py": 'url = f"http://{user}:{password}@{host}"\n',
    "corpus.txt": (
        "The secret: nobody knew the password to the old machine.\nHer token of love = a ring.\n"
    ),
    "layer.py": "self._auth = HTTPBasicAuth(user, password)",
    "hf.md": "hf_hub_download(repo_id, filename)",
    "conf.ini": "[a]\npassword =\ntoken = ${TOKEN}\n",
    "v.tfvars": "password_length = 12\n",
    "compose.yaml": "password: ${PASSWORD}\n",
    "rows.csv": "1,2,3\n" * 1000,
    "empty": "",
    "m.bin": b"\x00\x01\x02" * 999,
    "w.npy": b"\x93NUMPY\x01\x00v\x00" + bytes(range(256)) * 40,
    "b64.py": (
        "ICON_SHA = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA'\n"
    ),
    "names.py": (
        "LAYERS = ['conv2d_transpose_with_batch_normalization_and_leaky_relu_activation_block_3']\n"
    ),
    "model.json": json.dumps(
        {"class_name": "Dense", "config": {"units": 10, "kernel_initializer": "GlorotUniform"}}
    ),
    "sm.py": (
        "client.access_secret_version(name='projects/p/secrets/db-password/versions/latest')\n"
    ),
    "secret_names.yaml": "secretName: wandb-key\nsecret: projects/p/secrets/x\n",
    "public_key.pem.txt": "-----BEGIN RSA PUBLIC KEY-----\nMII\n",
}


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_credentials_are_found_by_name_or_content() -> None:
    missed = [name for name in BY_NAME.split() if not [*find_credentials(write(Path(name), "x"))]]
    for name, content in BY_CONTENT.items():
        findings = [*find_credentials(write(Path(f"content/{name}"), f"\n\n{content}"))]
        if not findings or int(findings[0].split()[1]) < 3:
            missed.append(name)
    assert missed == []


@pytest.mark.parametrize(("formats", "seed"), [(SECRETS, 1), (INNOCENT, 2)])
def test_drawn_secrets_are_found_and_what_looks_like_them_is_not(
    formats: tuple[str, ...], seed: int
) -> None:
    """In Python, YAML, UTF-16, a notebook's output and .gz."""
    files = [*drawn(formats, 120, seed, Path())]
    found = [line for line, path in files if [*find_credentials(path)]]
    assert found == [line for line, _ in files if formats is SECRETS]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--env=X=hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"],
            "env=X: this would stand in the job's spec",
        ),
        (["--env=OPENAI_KEY=sk-proj-" + X * 2], "use --secret=OPENAI_KEY=projects/P"),
        (["--env=PGPASSWORD=abc"], "env=PGPASSWORD"),
        (["--env=DATABASE_URL=postgres://me:pw12word@host/db"], "DATABASE_URL"),
        (["--script=train.py", "--", "--token=" + X * 2], "the argument --token: this would"),
        (["--script=train.py", "--", "--api-key", X * 2], "use --secret=API_KEY=projects/P"),
    ],
)
def test_no_secret_stands_in_a_spec(flags: list[str], line: str) -> None:
    Path("train.py").write_text("print()")
    recipe = [] if "--" in flags else ["--recipe=mlp_mnist"]
    assert line in error_of(
        submit.main, ["cpu", *WHERE, "--project=p", "--dry_run", *recipe, *flags]
    )


def test_the_variables_of_a_tiers_file_are_looked_at(typed: Command) -> None:
    """One may have no value there."""
    tier = (JOB_CONFIGS / "l4x1.yaml").read_text()
    for variables, code in (("{name: A}", 0), (f"{{name: B, value: hf_{'aBcDeFgHiJ' * 4}}}", 2)):
        program = f"    pythonPackageSpec:\n      env: [{variables}]"
        Path("mine.yaml").write_text(tier.replace("    pythonPackageSpec:", program))
        shown = typed("submit", "mine.yaml", *WHERE, *JOB, "--project=p", "--dry_run", code=code)
    assert "mine: env B: this would stand in the job's spec" in shown


def test_harmless_files_go_along() -> None:
    for name, content in {**HARMLESS, "mine/__init__.py": ""}.items():
        write(Path(f"mine/{name}"), content)
    assert len(user_sources(Path("mine")).files) > len(HARMLESS)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"x\n" * 2_500_000 + KEY.encode(), 2_500_001),
        (b"\xff\xd8\0\0" + b"\0" * 4_194_290 + KEY.encode(), 1),
    ],
)
def test_a_key_is_found_behind_the_first_megabytes_and_across_two_pieces(
    content: bytes, line: int
) -> None:
    assert [*find_credentials(write(Path("photo.jpg"), content))] == [
        f"line {line} (a private key)"
    ]


def test_each_finding_is_named_and_one_line_allows_a_file() -> None:
    folder = write(Path("mine/data/login.json"), BY_CONTENT["adc.json"]).parents[1]
    write(folder / "hub.py", f"A = 1\n{BY_CONTENT['gh.py']}\n\n{BY_CONTENT['ai.py']}\n")
    error = error_of(user_sources, folder)
    for part in (
        "mine/data/login.json, line 3 (",
        "mine/hub.py, line 2 (",
        "mine/hub.py, line 4 (",
    ):
        assert part in error
    assert "a1" * 18 not in error
    write(folder / ".gcloudignore", "#!allow:data/login.json\n/hub.py\n")
    assert [*user_sources(folder).files] == ["mine/data/login.json"]
    (folder / ".gcloudignore").unlink()
    assert " in mine/.gcloudignore, or in the line itself # pragma: allowlist secret" in error_of(
        user_sources, folder
    )


def test_in_a_checkout_what_git_tracks_goes_along_and_new_python_files() -> None:
    folder = Path("mine")
    for name in ("__init__.py", "table.json", "new.py", "made.json", "ignored.py", "old.bin"):
        write(folder / name, "")
    write(Path(".gitignore"), "ignored.py\n*.bin\n")
    tracked = "mine/__init__.py mine/table.json mine/old.bin"
    subprocess.run(f"git init -q && git add -f {tracked}", shell=True, check=True)
    sources = user_sources(folder)
    assert [*sources.files] == [
        "mine/__init__.py",
        "mine/new.py",
        "mine/old.bin",
        "mine/table.json",
    ]
    assert str(sources) == "4 files, 0.0 MB; 2 left out: mine/ignored.py, mine/made.json"
    assert "mine/made.json" in user_sources(folder, include=["*.json"]).files
    write(folder / "new.py", "from . import ignored\n")
    assert "mine/new.py, line 1, imports mine/ignored.py, which does not go along" in error_of(
        user_sources, folder
    )
    write(Path(".gitignore"), "runs/\n")
    assert [*user_sources(write(Path("runs/mine/a.py"), "").parent).files] == ["mine/a.py"]
