"""Tests that the interval for more GPUs holds the published times, each predicted from other configurations."""

import dataclasses

import pytest

from benchmarks.backtest import COVERAGE, HALF_WIDTHS, held_out, table
from deploy.planning.scaling import Case, Measurement, cases


def test_the_intervals_hold_the_published_times_and_are_narrow() -> None:
    outcomes = held_out(cases())
    assert len(outcomes) == 48
    for of in (lambda case: True, lambda case: case.rows_stay, lambda case: not case.rows_stay):
        some = [each.inside for each in outcomes if of(each.case)]
        assert sum(some) >= COVERAGE * len(some)
    assert all(each.predicted.half_width <= HALF_WIDTHS[each.case.rows_stay] for each in outcomes)
    print("\n".join(table(outcomes)))


@pytest.mark.parametrize("known", [("128", "512"), ("256", "1024"), ("128", "1024")])
def test_half_of_the_configurations_predict_the_others(known: tuple[str, str]) -> None:
    some = [case for case in cases() if case.configuration.split(",")[0] in known]
    others = [dataclasses.replace(case, configuration="other") for case in cases() if case not in some]
    outcomes = [each for each in held_out([*some, *others]) if each.case.configuration == "other"]
    assert sum(each.inside for each in outcomes) >= COVERAGE * len(outcomes)
    assert all(each.predicted.half_width <= HALF_WIDTHS[each.case.rows_stay] for each in outcomes)


def test_a_time_that_is_far_off_is_outside() -> None:
    case = cases()[0]
    late = Case("late", "V100", case.few, case.many, Measurement(4, 8, 2 * case.target.seconds))
    assert not next(each for each in held_out([*cases(), late]) if each.case is late).inside
