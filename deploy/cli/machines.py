"""`python -m deploy machines`: the table of machines, or the part of it that is asked for."""

from collections.abc import Sequence

from deploy.cli.arguments import add_flags, parser
from deploy.spec.machine_table import MachineOption, Machines, load_machines
from trainer.config.fields import nearest
from trainer.config.flags import whole
from trainer.errors import DONE, UserError


def main(arguments: Sequence[str]) -> int:
    """Prints the table, or what of it has the accelerator and the count asked for."""
    own = parser(
        "machines",
        "Lists the machines of Vertex AI training: accelerators, memory, price an hour, quota, regions.",
        "[--accelerator=TEXT] [--count=INT]",
    )
    own.add_argument("--accelerator", default="", metavar="TEXT", help="part of an accelerator's name, as L4")
    own.add_argument("--count", type=whole(0, 16), metavar="INT", help="accelerators of one machine; 0: none")
    add_flags(own, "prices")
    asked = own.parse_args(arguments)
    table = load_machines(asked.prices)
    part = asked.accelerator.upper().replace("-", "_")
    if part and not any(part in name for name in table.accelerators):
        raise UserError(
            f"accelerator={asked.accelerator}: no such accelerator{nearest(part, table.accelerators)} "
            f"Known: {', '.join(table.accelerators)}"
        )
    offers = [
        offer
        for offer in table.options()
        if (not part or (offer.accelerator and part in offer.accelerator.name)) and asked.count in (None, offer.count)
    ]
    if not offers:
        raise UserError(f"count={asked.count}: no machine has that many {asked.accelerator or 'accelerators'}")
    print(_table(offers, table))
    return DONE


def _table(offers: Sequence[MachineOption], table: Machines) -> str:
    rows: list[tuple[str, ...]] = [
        ("machine type", "accelerator", "count", "GB each", "vCPUs", "RAM GB", "USD/h", "spot USD/h")
    ]
    rows += [_row(offer) for offer in offers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines += ["", f"~ an estimate: Compute Engine's price of {table.date} in {table.region} x Vertex AI's surcharge"]
    for accelerator in dict.fromkeys(offer.accelerator for offer in offers if offer.accelerator):
        metric = accelerator.quota_metric or "quota metric not known"
        guessed = "" if accelerator.quota_metric_seen else " (its name by analogy)"
        lines += [
            f"{accelerator.name}: {accelerator.note}",
            f"  {metric}{guessed}",
            f"  {' '.join(accelerator.regions)}",
        ]
    return "\n".join(lines)


def _row(offer: MachineOption) -> tuple[str, ...]:
    machine, accelerator = offer.machine, offer.accelerator
    memory = accelerator.memory_gb if accelerator else None
    facts = (offer.count or None, memory, machine.vcpus, machine.memory_gb)
    cells = ["" if value is None else f"{value:g}" for value in facts]
    sign = "~" if offer.price.inferred else ""
    prices = ["" if usd is None else f"{sign}{usd:.2f}" for usd in (offer.price.list, offer.price.spot)]
    return (machine.name, accelerator.name if accelerator else "", *cells, *prices)
