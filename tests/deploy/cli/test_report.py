"""report.html: one file, whole, readable in light and dark, with nothing from outside; and the
verb."""

import re
from collections import Counter
from pathlib import Path

import pytest

from deploy.api.compare import CompareOptions
from deploy.api.plan import pareto_front
from deploy.report.collection import report_folder
from tests.deploy.conftest import Command, put
from tests.deploy.planted import noisy, plant, sample
from trainer.base.errors import UserError
from trainer.base.settings.fields import coerce, fields_of
from trainer.base.storage.local_files import Address

VOID = {"meta", "source", "img", "br", "link", "hr", "input"}


@pytest.fixture
def runs() -> Path:
    sample(plant("runs/one", noisy(0.1), epochs=True))
    sample(plant("runs/two", noisy(0.06), devices=("CPU:0", "CPU:1"), epochs=True))
    plant("runs/three", noisy(0.05), devices=("GPU:0", "GPU:1"), epochs=True)
    plant("runs/broken", noisy(0.06, 3), state="failed", error="it <b>broke</b> & stopped")
    return Path("runs").absolute()


def test_the_page_is_whole_and_needs_nothing_from_outside(runs: Path, typed: Command) -> None:
    prices = ["--price-per-hour=one=1", "--price_per_hour=three=1.5"]
    shown = typed("report", str(runs), *prices, "--baseline=two")
    out = runs / "report"
    text = (out / "report.html").read_text()
    opened, closed = (
        Counter(re.findall(tag, text)) for tag in (r"<(\w+)[^>]*(?<!/)>", r"</(\w+)>")
    )
    assert set(opened - closed) <= VOID
    assert not closed - opened
    assert not re.search("<(script|link|iframe|object|base|form)", text)
    addresses = re.findall(r'\s(?:src|srcset|href)="([^"]*)"', text)
    assert all(re.match(r"data:image/(png|svg\+xml);base64,", address) for address in addresses)
    assert not re.search(r"@import|url\(|\son\w+=", text)
    assert re.search(
        r"(?s)Buy three.*Time and money.*Loss.*<table.*<details><summary>All numbers.*<table", text
    )
    assert opened["source"] == 4 * opened["picture"] == 8
    assert text.count("samples of") == 2
    assert text.count("prefers-color-scheme: dark") == 5
    assert (out / "time_and_money.png").read_bytes().startswith(b"\x89PNG")
    verdict, table, rest = shown.split("\n\n", 2)
    assert verdict.startswith("Buy three")
    assert len(table.splitlines()) <= 9
    assert rest.count("\n") <= 4
    assert rest.endswith("runs/report/report.html\n")


def test_a_report_lies_beside_all_runs_and_never_in_one(runs: Path) -> None:
    one = str(runs / "one")
    for folders in ([str(runs)], [one], [one, str(runs / "two")]):
        assert Path(report_folder(folders)).resolve() == runs / "report"
    other = plant("other/run", noisy(0.1))
    assert Path(report_folder([one, str(other)])).resolve() == Path("report").absolute()
    (runs / "comparison.json").write_text("{}")
    assert report_folder([str(runs)]) == str(runs)
    # a part of a comparison is not the whole
    assert Path(report_folder([one])).resolve() == runs / "report"


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_report_of_a_bucket_is_written_here(runs: Path, bucket: Address, typed: Command) -> None:
    put(runs, bucket / "runs")
    typed("report", f"{bucket}runs")
    assert Path("runs/report/report.html").read_text().count('alt="samples of') == 2


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(3, 1), (1, 3), (2, 2), (2.5, 2.5), (1, 4), (4, 1)], [1, 2, 0]),
        ([(1, 1), (1, 1)], [0]),
        ([], []),
    ],
)
def test_the_pareto_front(points: list[tuple[float, float]], front: list[int]) -> None:
    assert pareto_front(points) == front


@pytest.mark.parametrize("text", ["l4x1", "l4x1=", "=3", "l4x1=0", "l4x1=nan", "l4x1=x"])
def test_prices_that_are_none_are_refused(text: str) -> None:
    field = fields_of(CompareOptions)["price_per_hour"]
    with pytest.raises(UserError, match=r"price_per_hour=.* must be"):
        coerce(field, [text])
    assert coerce(field, ["a=0.5", "c=2"]) == {"a": 0.5, "c": 2.0}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "DIR is missing: python -m deploy report DIR …"),
        (["none"], "error: none: no such folder"),
        (["{runs}", "--basline=x"], "unknown flag --basline; did you mean 'baseline'?"),
        (["{runs}", "--baseline=tow"], "tow: no such tier; did you mean 'two'?"),
    ],
)
def test_mistakes_are_one_line(
    runs: Path, refused: Command, arguments: list[str], line: str
) -> None:
    assert line in refused("report", *(argument.format(runs=runs) for argument in arguments))
