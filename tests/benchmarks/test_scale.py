"""Tests small versions of what benchmarks/scale.py measures, and that its parts work at any size."""

from unittest.mock import patch

import pytest

from benchmarks import scale
from deploy.platform.local import free_addresses
from trainer.base.errors import PlatformFault
from trainer.cluster import rendezvous
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.rendezvous import meet


def test_workers_meet_end_together_and_leave_when_one_is_lost() -> None:
    assert all(seconds > 0 for seconds in scale.meeting(24).values())


def test_the_chief_compares_each_worker_once() -> None:
    with patch.object(rendezvous, "differing", return_value="") as compared, scale.met(24) as (job, _):
        assert len(job) == 24
    assert compared.call_count == 23


def test_of_many_workers_that_do_not_come_some_are_named() -> None:
    addresses = tuple(f"127.0.0.1:{port}" for port in (free_addresses(1)[0].split(":")[1], *range(1, 256)))
    with pytest.raises(PlatformFault, match=r"^worker 1 .*, worker 8 \(127\.0\.0\.1:8\) and 247 more did not start"):
        meet(Cluster(addresses), {}, 0.01)


def test_a_bucket_of_several_pages_is_listed() -> None:
    assert scale.listing(2500)["s"] > 0


def test_the_order_of_rows_is_known_at_any_size() -> None:
    assert scale.order(10**12)["s for 1,000,000 rows"] > 0


def test_a_comparison_of_many_tiers_is_reported() -> None:
    assert scale.comparison(5)["kB of report.html"] > 50
