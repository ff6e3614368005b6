"""Draws secrets in the formats that services document, and innocent lines that look like them, each
in a file.

A `{letter}{number}` in a format is so many characters drawn from an alphabet; places are texts
around a line.
"""

import gzip
import json
import random
import re
import string
from collections.abc import Callable, Iterator
from pathlib import Path

ALPHABETS = {
    "A": string.ascii_letters + string.digits,
    "U": string.ascii_uppercase + string.digits,
    "h": "0123456789abcdef",
    "d": string.digits,
    "B": string.ascii_letters + string.digits + "+/",
    "w": string.ascii_lowercase,
}
SECRETS = (
    "OPENAI_API_KEY = 'sk-proj-{A20}T3BlbkFJ{A20}'",
    "anthropic_key = 'sk-ant-api03-{A93}AA'",
    "hf_token = 'hf_{A34}'",
    "token: ghp_{A36}",
    "github_pat = 'github_pat_{A22}_{A59}'",
    "url = 'https://oauth2:glpat-{A20}@gitlab.com/me/mine.git'",
    "aws_access_key_id = AKIA{U16}",
    "aws_secret_access_key = '{B40}'",
    "GOOGLE_API_KEY = 'AIza{A35}'",
    "client_secret = 'GOCSPX-{A28}'",
    "headers = {'Authorization': 'Bearer ya29.{A60}'}",
    "WANDB_API_KEY={h40}",
    "wandb.login(key='{h40}')",
    "slack = 'xoxb-{d12}-{d12}-{A24}'",
    "hook = 'https://hooks.slack.com/services/T{U8}/B{U8}/{A24}'",
    "stripe.api_key = 'sk_live_{A24}'",
    "twilio_auth_token = '{h32}'",
    "SENDGRID = 'SG.{A22}.{A43}'",
    "npm_token = 'npm_{A36}'",
    "PYPI_TOKEN = 'pypi-AgEIcHlwaS5vcmc{A60}'",
    "dckr_pat_{A27}",
    "engine = create_engine('postgresql://train:{A14}@10.0.0.5/churn')",
    "MONGO = 'mongodb+srv://me:{A12}@c0.ab1.mongodb.net'",
    "password = '{A9}!{A4}'",
    "db_passwd: {A12}",
    "PGPASSWORD={A12} psql -h db",
    "mysql -u root --password={A10} churn",
    "KAGGLE_KEY = '{h32}'",
    '{{"username": "me", "key": "{h32}"}}',
    "COMET_API_KEY = '{A25}'",
    "NEPTUNE_API_TOKEN = '{B80}'",
    "AccountKey={B86}==;EndpointSuffix=core.windows.net",
    "sas = '?sv=2022-11-02&sig={A43}%3D'",
    "X-Goog-Signature={h256}",
    "replicate = 'r8_{A37}'",
    "GROQ_API_KEY='gsk_{A52}'",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0{A20}.{A43}",
    "-----BEGIN RSA PRIVATE KEY-----\nMII{B60}\n",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz{B60}\n",
    "discord = 'https://discord.com/api/webhooks/{d18}/{A68}'",
)
INNOCENT = (
    "OPENAI_API_KEY = 'your-api-key-here'",
    "hf_token = 'hf_your_token_here'",
    "token: <YOUR_TOKEN>",
    "password = 'changeme'",
    "aws_access_key_id = AKIAIOSFODNN7EXAMPLE",
    "aws_secret_access_key = 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY'",
    "token = os.environ['HF_TOKEN']",
    "password = getpass.getpass()",
    "api_key = config.get('api_key')",
    "secret: ${{{{ secrets.HF }}}}",
    "max_tokens = {d4}",
    "pad_token = '[PAD]'",
    "tokenizer = 'bert-base-uncased'",
    "token_type_ids = [0, 1]",
    "bucket = 'gs://task-sk-learn-{w12}'",
    "disk = 'disk-usage-{w14}'",
    "# a password has to have at least 12 characters",
    "commit = '{h40}'",
    "sha256 = '{h64}'",
    "md5: {h32}",
    "--hash=sha256:{h64}",
    "run_id = '{h8}-{h4}-{h4}-{h4}-{h12}'",
    "image = 'us-docker.pkg.dev/p/r/i@sha256:{h64}'",
    "seed = {d9}",
    "x = [0.{d12}, 0.{d12}, -1.{d12}]",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{B43} me@home",
    "-----BEGIN PUBLIC KEY-----\nMFkw{B60}\n-----END PUBLIC KEY-----",
    "url = 'https://storage.googleapis.com/download.tensorflow.org/{w9}/{w9}.tgz'",
    "checkpoint = 'step-{d8}'",
    "job = 'projects/{d12}/locations/us-central1/customJobs/{d19}'",
    "secret = 'projects/p/secrets/{w8}/versions/latest'",
    "weights = 'efficientnetb0_notop.h5', '{h32}'",
    "vocabulary = ['{w7}', '{w9}', '{w6}', '{w11}']",
    "key = 'image/encoded'",
    "keys = sorted(history.history.keys())",
    "id: {A11}",
    "callbacks.ModelCheckpoint('{{epoch:02d}}-{{val_loss:.2f}}.keras')",
    "password_column = 'password_length'",
    "secret_santa = 'anna'",
    "data:image/png;base64,iVBORw0KGgo{B90}",
)
PLACES: tuple[tuple[str, Callable[[str], bytes]], ...] = (
    ("train.py", lambda line: f"import os\n\n{line}\n".encode()),
    ("settings.yaml", lambda line: f"model: cnn\n{line}\n".encode()),
    ("notes.txt", lambda line: f"Run it like this:\n  {line}\n".encode("utf-16")),
    (
        "tried.ipynb",
        lambda line: json.dumps(
            {
                "cells": [
                    {
                        "cell_type": "code",
                        "source": ["print()\n"],
                        "outputs": [{"output_type": "stream", "text": [f"{line}\n"]}],
                    }
                ]
            }
        ).encode(),
    ),
    ("log.txt.gz", lambda line: gzip.compress(f"step 1\n{line}\n".encode())),
)


def drawn(
    formats: tuple[str, ...], count: int, seed: int, folder: Path
) -> Iterator[tuple[str, Path]]:
    """Writes `count` files with one line each, drawn from `formats`, and yields the line and the
    file."""
    draw = random.Random(seed)
    for number in range(count):
        template = formats[number % len(formats)]
        line = (
            re.sub(
                r"\{([AUhdBw])(\d+)\}",
                lambda match: "".join(draw.choices(ALPHABETS[match[1]], k=int(match[2]))),
                template,
            )
            .replace("{{", "{")
            .replace("}}", "}")
        )
        name, content = PLACES[draw.choice([0, 0, 0, 1, 1, 2, 3, 4])]
        path = folder / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content(line))
        yield line, path
