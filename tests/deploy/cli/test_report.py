"""report.html: one file, whole, readable in light and dark, with nothing from outside; and the verb."""

import re
from collections import Counter
from pathlib import Path

import pytest

from deploy.__main__ import main
from deploy.api.compare import CompareOptions
from deploy.report.plots import pareto_front
from tests.deploy.conftest import Capture, Command, put
from tests.deploy.planted import noisy, plant, sample
from trainer.base.errors import UserError
from trainer.base.settings.fields import coerce, fields_of
from trainer.base.storage.local_files import Address

VOID = {"meta", "img", "br", "link", "hr", "input"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    sample(plant(tmp_path / "runs" / "one", noisy(0.1), epochs=True))
    sample(plant(tmp_path / "runs" / "two", noisy(0.06), devices=("CPU:0", "CPU:1"), epochs=True))
    plant(tmp_path / "runs" / "three", noisy(0.05), devices=("GPU:0", "GPU:1"), epochs=True)
    plant(tmp_path / "runs" / "broken", noisy(0.06, 3), state="failed", error="it <b>broke</b> & stopped")
    return tmp_path / "runs"


def test_the_page_is_whole_and_needs_nothing_from_outside(runs: Path, capsys: Capture) -> None:
    assert main(["report", str(runs), "--price-per-hour=one=1", "--price_per_hour=three=1.5", "--baseline=two"]) == 0
    text = (runs / "report.html").read_text()
    opened, closed = (Counter(re.findall(tag, text)) for tag in (r"<(\w+)[^>]*(?<!/)>", r"</(\w+)>"))
    assert set(opened - closed) <= VOID
    assert not closed - opened
    assert not {"script", "link", "iframe", "object", "base", "form"} & {*re.findall(r"<(\w+)", text)}
    values: dict[str, list[str]] = {}
    for name, value in re.findall(r'\s([\w:]+)="([^"]*)"', text):
        values.setdefault(name, []).append(value)
    assert all(address.startswith("data:image/png;base64,") for address in values["src"])
    references = values.get("href", []) + values["xlink:href"]
    assert all(address.startswith("#") for address in references)
    assert not re.search(r"@import|url\((?!#)|\son\w+=", text)
    ids = values["id"]
    assert len(ids) == len(set(ids))
    assert {*re.findall(r"url\(#([^)]*)\)", text), *(address[1:] for address in references)} <= set(ids)
    assert re.search(r"(?s)three is the fastest.*<svg.*<table", text)
    drawn = re.findall("<h3>([^<]*)</h3>", text)  # no bars beside a simulated tier
    assert drawn[:2] == ["Cost against time", "Loss"]
    assert "Speed-up" not in drawn
    assert opened["img"] == 2
    assert str(runs / "report.html") in capsys.readouterr().out
    for form in ("table.md", "table.csv", "table.json"):
        assert "two" in (runs / form).read_text()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_report_of_a_bucket_is_written_here(runs: Path, bucket: Address) -> None:
    put(runs, bucket / "runs")
    assert main(["report", f"{bucket}runs"]) == 0
    assert Path("runs/report/report.html").read_text().count('alt="samples of') == 2


@pytest.mark.parametrize(("points", "front"), [
    ([(3, 1), (1, 3), (2, 2), (2.5, 2.5), (1, 4), (4, 1)], [1, 2, 0]), ([(1, 1), (1, 1)], [0]), ([], []),
])  # fmt: skip
def test_the_pareto_front(points: list[tuple[float, float]], front: list[int]) -> None:
    assert pareto_front(points) == front


@pytest.mark.parametrize("text", ["l4x1", "l4x1=", "=3", "l4x1=-1", "l4x1=0", "l4x1=nan", "l4x1=inf", "l4x1=x"])
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
def test_mistakes_are_one_line(runs: Path, refused: Command, arguments: list[str], line: str) -> None:
    assert line in refused("report", *(argument.format(runs=runs) for argument in arguments))
