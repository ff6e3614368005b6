"""report.html: one file, whole, readable in light and dark, with nothing from outside; and the
verb."""

import re
from collections import Counter
from pathlib import Path

import pytest

from deploy.__main__ import main
from deploy.api.compare import CompareOptions
from deploy.api.plan import pareto_front
from deploy.report.collection import report_folder
from tests.deploy.conftest import Capture, Command, put
from tests.deploy.planted import noisy, plant, sample
from trainer.base.errors import UserError
from trainer.base.settings.fields import coerce, fields_of
from trainer.base.storage.local_files import Address

VOID = {"meta", "source", "img", "br", "link", "hr", "input"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    sample(plant(tmp_path / "runs" / "one", noisy(0.1), epochs=True))
    sample(plant(tmp_path / "runs" / "two", noisy(0.06), devices=("CPU:0", "CPU:1"), epochs=True))
    plant(tmp_path / "runs" / "three", noisy(0.05), devices=("GPU:0", "GPU:1"), epochs=True)
    plant(
        tmp_path / "runs" / "broken",
        noisy(0.06, 3),
        state="failed",
        error="it <b>broke</b> & stopped",
    )
    return tmp_path / "runs"


def test_the_page_is_whole_and_needs_nothing_from_outside(runs: Path, capsys: Capture) -> None:
    assert (
        main(
            [
                "report",
                str(runs),
                "--price-per-hour=one=1",
                "--price_per_hour=three=1.5",
                "--baseline=two",
            ]
        )
        == 0
    )
    out = runs / "report"
    text = (out / "report.html").read_text()
    opened, closed = (
        Counter(re.findall(tag, text)) for tag in (r"<(\w+)[^>]*(?<!/)>", r"</(\w+)>")
    )
    assert set(opened - closed) <= VOID
    assert not closed - opened
    assert not {"script", "link", "iframe", "object", "base", "form"} & {
        *re.findall(r"<(\w+)", text)
    }
    addresses = re.findall(r'\s(?:src|srcset|href)="([^"]*)"', text)
    assert all(re.match(r"data:image/(png|svg\+xml);base64,", address) for address in addresses)
    assert not re.search(r"@import|url\(|\son\w+=", text)
    assert re.search(
        r"(?s)Buy three.*Time and money.*Loss.*<table.*<details><summary>All numbers.*<table", text
    )
    assert (opened["picture"], opened["source"], text.count("samples of")) == (2, 8, 2)
    assert len(re.findall("prefers-color-scheme: dark", text)) == 5
    assert (out / "time_and_money.png").read_bytes().startswith(b"\x89PNG")
    for form in ("table.md", "table.json"):
        assert "two" in (out / form).read_text()
    verdict, table, rest = capsys.readouterr().out.split("\n\n", 2)
    assert verdict.startswith("Buy three")
    assert len(table.splitlines()) <= 9
    assert len(rest.strip().splitlines()) <= 4
    assert rest.endswith("runs/report/report.html\n")


def test_a_report_lies_beside_all_runs_and_never_in_one(runs: Path, tmp_path: Path) -> None:
    one = str(runs / "one")
    for folders in ([str(runs)], [one], [one, str(runs / "two")]):
        assert Path(report_folder(folders)).resolve() == runs / "report"
    other = plant(tmp_path / "other" / "run", noisy(0.1))
    assert Path(report_folder([one, str(other)])).resolve() == tmp_path / "report"
    (runs / "comparison.json").write_text("{}")
    assert report_folder([str(runs)]) == str(runs)
    # a part of a comparison is not the whole
    assert Path(report_folder([one])).resolve() == runs / "report"


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_report_of_a_bucket_is_written_here(runs: Path, bucket: Address) -> None:
    put(runs, bucket / "runs")
    assert main(["report", f"{bucket}runs"]) == 0
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


@pytest.mark.parametrize(
    "text", ["l4x1", "l4x1=", "=3", "l4x1=-1", "l4x1=0", "l4x1=nan", "l4x1=inf", "l4x1=x"]
)
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
        (["{runs}", "--steps=3"], "unknown flag --steps"),
        (["{runs}", "--folders=x"], "unknown flag --folders"),
        (["{runs}", "--baseline=tow"], "tow: no such tier; did you mean 'two'?"),
    ],
)
def test_mistakes_are_one_line(
    runs: Path, refused: Command, arguments: list[str], line: str
) -> None:
    assert line in refused("report", *(argument.format(runs=runs) for argument in arguments))
