"""`headrace devices`: the devices of this machine, their memory and number formats, and what is installed."""

import dataclasses
import json

from headrace.cli.options import add_platform_argument
from headrace.cli.tables import Column, print_fitted, table_lines
from headrace.config.command_line import Parser
from headrace.core.units import format_bytes

_DEVICES = "List the devices that a run would find here, the memory and number formats of each, and versions."


def devices(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace devices", description=_DEVICES)
    add_platform_argument(parser, "kind of device [auto]", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from headrace.engine.devices import start_devices
    from headrace.engine.machine import describe_machine

    start_devices(args.platform, 1)
    machine = describe_machine()
    if args.json:
        print(json.dumps(dataclasses.asdict(machine)))
        return 0
    rows = machine.devices
    memories = [format_bytes(row.memory_bytes) if row.memory_bytes else "" for row in rows]
    columns = [
        Column(title="platform", cells=[row.platform for row in rows]),
        Column(title="device", cells=[row.name for row in rows]),
        Column(title="count", cells=[str(row.count) for row in rows], right=True),
        Column(
            title="memory of each",
            cells=memories,
        ),
        Column(title="capability", cells=[row.capability for row in rows]),
        Column(title="bfloat16", cells=[row.bfloat16 for row in rows]),
    ]
    print("\n".join(table_lines(columns)))
    memory = f", {format_bytes(machine.memory_bytes)} of memory" if machine.memory_bytes else ""
    print_fitted(f"\nhost      {machine.host}: {machine.processors} processors for this process{memory}")
    print_fitted(f"kernels   {machine.kernels}")
    print_fitted(f"versions  {', '.join(f'{name} {version}' for name, version in machine.versions.items())}")
    for note in machine.notes:
        print(f"note: {note}")
    return 0
