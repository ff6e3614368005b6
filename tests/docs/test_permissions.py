"""Tests that docs/permissions.md names every role and API that the program names."""

import re

from tests.docs.sources import ROOT, texts

PAGE = (ROOT / "docs" / "permissions.md").read_text(encoding="utf-8")


def test_every_role_of_the_program_is_on_the_page() -> None:
    named = {role for text in texts() for role in re.findall(r"roles/[A-Za-z.]*[A-Za-z]", text)}
    assert len(named) >= 5
    assert named <= set(re.findall(r"`(roles/[\w.]+)`", PAGE))


def test_every_role_that_is_granted_is_in_a_table_or_explained() -> None:
    granted = set(re.findall(r"--role=(roles/[\w.]+)", PAGE))
    assert granted <= set(re.findall(r"`(roles/[\w.]+)`", PAGE))


def test_every_api_is_enabled_by_a_command() -> None:
    listed = set(re.findall(r"`(\w+\.googleapis\.com)`", PAGE))
    commands = " ".join(re.findall(r"^gcloud services enable .*$", PAGE, re.MULTILINE))
    assert listed == set(re.findall(r"\w+\.googleapis\.com", commands))
