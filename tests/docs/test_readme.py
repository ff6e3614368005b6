"""Tests that the tables of README and its nearest pages match the source, and that its pictures exist and are small."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.tiers.gcp_config import needed_project, needed_region
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import JOB_CONFIGS, Tier, load_tier
from tests.docs.sources import ROOT
from trainer.base.errors import UserError
from trainer.base.settings.metric_names import OF_IMAGES
from trainer.base.settings.resolution import recipe_names
from trainer.base.settings.train_config import DATA_KINDS

README, TIERS, RECIPES, EXAMPLES, DATA, GANS, QUALITY = (
    (ROOT / page).read_text(encoding="utf-8")
    for page in (
        "README.md",
        "docs/tiers.md",
        "docs/recipes.md",
        "examples/README.md",
        "docs/data.md",
        "docs/gans.md",
        "docs/quality.md",
    )
)


def family(tier: Tier) -> str:
    """Returns `l4x` for `l4x2`: tiers that differ only in the number of accelerators share a row."""
    counted = re.fullmatch(r"(.+x)\d+", tier.name)
    return counted[1] if counted else tier.name


def tier_rows() -> Iterator[str]:
    """Yields the lines of the table of tiers, cheapest family first."""
    families: dict[str, list[Tier]] = {}
    for path in JOB_CONFIGS.glob("*.yaml"):
        tier = load_tier(path.stem)
        families.setdefault(family(tier), []).append(tier)
    yield "| tiers | machine | accelerators of each | USD an hour |"
    yield "|---|---|---|--:|"
    for tiers in sorted(families.values(), key=lambda tiers: min(tier.price_per_hour or 0 for tier in tiers)):
        yield row(sorted(tiers, key=lambda tier: tier.accelerators))


def row(tiers: list[Tier]) -> str:
    """Returns the row of one family: names, machines, accelerators, prices, by number of accelerators."""
    names = " ".join(f"`{tier.name}`" for tier in tiers)
    first, *others = dict.fromkeys(tier.machine_type for tier in tiers)
    machines = ", ".join([first, *(f"-{other.rsplit('-', 1)[1]}" for other in others)])
    machines = f"{tiers[0].workers} x {machines}" if tiers[0].workers > 1 else machines
    kind = load_machines().accelerators.get(tiers[0].accelerator_type or "")
    counts = ", ".join(str(tier.accelerators) for tier in tiers)
    accelerators = f"{counts} x {kind.name}, {kind.memory_gb} GB" if kind else "none"
    prices = ", ".join(price(tier) for tier in tiers)
    return f"| {names} | {machines} | {accelerators} | {prices} |"


def price(tier: Tier) -> str:
    return f"{tier.price_per_hour:.2f}" + ("" if tier.strategy == "STANDARD" else "*")


def test_the_table_of_tiers_matches_the_machine_table() -> None:
    table = "\n".join(tier_rows())
    assert table in TIERS, f"put this into docs/tiers.md:\n{table}"
    assert f"estimates of {load_machines().date} for {load_machines().region}" in TIERS


def test_every_recipe_has_a_row() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", RECIPES, re.MULTILINE)) == recipe_names()


def test_every_example_has_a_row() -> None:
    found = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.py\) \|", EXAMPLES, re.MULTILINE)
    assert sorted(found) == sorted((path.stem, path.stem) for path in (ROOT / "examples").glob("[!_]*.py"))


def first_cells(page: str, heads: str) -> list[str]:
    """Returns the names in backticks in the first column of the table with this head."""
    table = page.partition(f"\n{heads}\n")[2].partition("\n\n")[0]
    return [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]


def test_every_kind_of_data_has_a_row() -> None:
    assert sorted(first_cells(DATA, "| kind | content |")) == sorted(DATA_KINDS)


def test_every_measure_of_images_has_a_row() -> None:
    assert sorted(first_cells(QUALITY, "| | formula | source | better |")) == sorted(OF_IMAGES)
    assert sorted(first_cells(GANS, "| | | better |")) == sorted(OF_IMAGES)


def test_the_readme_counts_what_there_is() -> None:
    words = ("seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")
    tiers, recipes = len([*JOB_CONFIGS.glob("*.yaml")]), words[len(recipe_names()) - 7]
    examples = words[len([*(ROOT / "examples").glob("[!_]*.py")]) - 7].capitalize()
    for text in (f"[{tiers} of them](docs/tiers.md)", f"[{recipes} recipes](", f"[{examples} examples]("):
        assert text in README


def test_the_readme_says_what_submit_asks_for_first(tmp_path: Path) -> None:
    for needed in (lambda: needed_region("", {"CLOUDSDK_CONFIG": str(tmp_path)}), lambda: needed_project("")):
        with pytest.raises(UserError) as missing:
            needed()
        (command,) = re.findall("`(gcloud config set [a-z/]+)", str(missing.value))
        assert f"`{command} " in README


def test_pictures_are_small_and_shown() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*.png"))
    assert [picture.name for picture in pictures] == [
        "clothes.png",
        "digits.png",
        "quality.png",
        "rooms.png",
        "tiers.png",
    ]
    quality = (ROOT / "docs" / "quality.md").read_text("utf-8")
    for picture in pictures:
        assert picture.stat().st_size < 150_000
        assert f"docs/images/{picture.name}" in README or f"](images/{picture.name})" in quality
