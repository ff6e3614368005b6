"""Prints the table of machines, or a part of it: `python -m deploy machines`."""

from collections.abc import Sequence

from deploy.cli.arguments import add_flags, parser
from deploy.tiers.machine_table import MachineOption, Machines, load_machines
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.flags import whole


def main(arguments: Sequence[str]) -> int:
    """Prints the machines with the given accelerator and count."""
    cli = parser(
        "machines",
        "Lists the machines of Vertex AI training: accelerators, memory, price an hour, quota, regions.",
        "[--accelerator=TEXT] [--count=INT]",
    )
    cli.add_argument("--accelerator", default="", metavar="TEXT", help="part of an accelerator's name, such as L4")
    cli.add_argument("--count", type=whole(0, 16), metavar="INT", help="accelerators of one machine; 0: none")
    add_flags(cli, "prices")
    args = cli.parse_args(arguments)
    table = load_machines(args.prices)
    part = args.accelerator.upper().replace("-", "_")
    if part and not any(part in name for name in table.accelerators):
        raise UserError(
            f"accelerator={args.accelerator}: unknown accelerator{nearest(part, table.accelerators)} "
            f"Known: {', '.join(table.accelerators)}"
        )
    options = [
        option
        for option in table.options()
        if (not part or (option.accelerator and part in option.accelerator.name)) and args.count in (None, option.count)
    ]
    if not options:
        raise UserError(f"count={args.count}: no machine has that many {args.accelerator or 'accelerators'}")
    print(_table(options, table))
    return DONE


def _table(options: Sequence[MachineOption], table: Machines) -> str:
    header = ("machine type", "accelerator", "count", "GB each", "vCPUs", "RAM GB", "USD/h", "spot USD/h")
    rows = [header, *(_row(option) for option in options)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines += [
        "",
        f"~ an estimate: Compute Engine's price of {table.date} in {table.region} and Vertex AI's fee of 15 % of its "
        "list price (for spot inferred), without the boot disk; > without that fee: a lower bound",
    ]
    for accelerator in dict.fromkeys(option.accelerator for option in options if option.accelerator):
        metric = accelerator.quota_metric or "unknown quota metric"
        quota = f"  {metric}" + ("" if accelerator.quota_metric_seen else " (name inferred)")
        lines += [f"{accelerator.name}: {accelerator.note}", quota, f"  {' '.join(accelerator.regions)}"]
        lines += [
            f"  only on Google's page of {page}: {' '.join(names)}"
            for page, names in accelerator.one_page.items()
            if names
        ]
    return "\n".join(lines)


def _row(option: MachineOption) -> tuple[str, ...]:
    machine, accelerator = option.machine, option.accelerator
    memory = accelerator.memory_gb if accelerator else None
    facts = (option.count or None, memory, machine.vcpus, machine.memory_gb)
    cells = ["" if value is None else f"{value:g}" for value in facts]
    sign = ">" if option.price.lower_bound else "~" if option.price.inferred else ""
    prices = ["" if usd is None else f"{sign}{usd:.2f}" for usd in (option.price.list, option.price.spot)]
    return (machine.name, accelerator.name if accelerator else "", *cells, *prices)
