"""Asks Google for the prices of a region: `python -m deploy prices --region=NAME --out=prices.yaml`.

Reads the Cloud Billing Catalog with this machine's login, writes a file for --prices= with the identifiers of the SKUs,
and prints what differs from the table of this package. A part without exactly one SKU leaves its machine without a
price, with the names that were found: nothing is guessed.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from deploy.client.arguments import add_flags, parser
from deploy.tiers.gcp_config import needed_region
from deploy.tiers.machine_table import Machines, Price, load_machines
from deploy.vertex.errors import billing_errors
from deploy.vertex.price_catalog import CatalogPrice, price_of, price_of_gpu, read_skus
from deploy.vertex.session import SESSION, Session
from trainer.base.errors import DONE
from trainer.base.storage import local_path, write_whole

KINDS = ("list", "spot", "flex_start")
_DIFFERS = 0.005  # of the table's price


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Writes the file and prints the comparison."""
    cli = parser("prices", __doc__ or "", "--region=NAME [--out=FILE]")
    add_flags(cli, "region")
    cli.add_argument("--out", default="prices.yaml", metavar="FILE", help="the price file (default: %(default)s)")
    args = cli.parse_args(arguments)
    region, out = needed_region(args.region), local_path(args.out, "out")
    with billing_errors("the Cloud Billing Catalog", "enable cloudbilling.googleapis.com in gcloud's project"):
        skus = read_skus(region, session.clock)
    table = load_machines()
    items = {name: {kind: price_of(machine, table, skus, kind) for kind in KINDS}
             for name, machine in table.machines.items() if machine.vcpus}  # fmt: skip
    attached = {name for machine in table.machines.values() if machine.attached for name in machine.counts}
    items |= {name: {kind: price_of_gpu(name, table, skus, kind) for kind in KINDS} for name in sorted(attached)}
    date = datetime.fromtimestamp(session.clock.now(), UTC).date()
    lines = [f"# {region}, {date}: Cloud Billing Catalog, by `python -m deploy prices`; USD an hour, without boot disk"]
    for name, kinds in items.items():
        known = {kind: price for kind, price in kinds.items() if price.usd is not None}
        lines += [f"# {kind}: {', '.join(sku.identifier for sku in price.skus)}" for kind, price in known.items()]
        if known:
            lines.append(f"{name}: {{{', '.join(f'{kind}: {_total(price):.6f}' for kind, price in known.items())}}}")
    write_whole(out, "\n".join(lines) + "\n")
    print("\n".join(_differences(items, table, region)))
    priced = sum(any(price.usd is not None for price in kinds.values()) for kinds in items.values())
    print(f"{priced} of {len(items)} machines and accelerators have a price in {out}: use it with --prices={args.out}")
    return DONE


def _total(price: CatalogPrice) -> float:
    return (price.usd or 0.0) + price.local_ssd


def _differences(items: dict[str, dict[str, CatalogPrice]], table: Machines, region: str) -> Iterator[str]:
    """Yields a line for each price that differs from the table's, and for each machine that lacks one."""
    for name, kinds in items.items():
        listed: Price = (table.machines.get(name) or table.accelerators[name]).price
        for kind, price in kinds.items():
            before = getattr(listed, kind)
            if price.usd is None:
                if before is not None:
                    yield f"{name}: no price as {kind}: {price.why}"
                continue
            parts = f" = {price.usd:.3f} + local SSD {price.local_ssd:.3f}" if price.local_ssd else ""
            change = "not in the table" if before is None else f"{100 * (_total(price) / before - 1):+.1f} %"
            if before is None or abs(_total(price) / before - 1) > _DIFFERS:
                yield f"{name} as {kind} in {region}: {_total(price):.3f}{parts} ({change}, table {before or 0:.3f})"
