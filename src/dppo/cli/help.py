"""The help texts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from dppo.cli.fields import Field, config_fields


def command_help(name: str, summary: str, *, options: Mapping[str, Field], examples: str) -> str:
    """The help of one command.

    Args:
        name: The command.
        summary: What it does, in one line.
        options: Its own options.
        examples: Printed at the end.

    Returns:
        The text: own options, then every field of `DPPOConfig`.
    """
    table = config_fields()
    lines = [f"usage: dppo {name} [--config FILE.yaml] [--option value ...]", "", summary, ""]
    lines += ["options (in the file or as flags, a-b or a_b; flags win):"]
    lines += [_option(field) for field in options.values()]
    lines += ["", "fields of DPPOConfig:"]
    lines += [_option(table.fields[key]) for key in sorted(table.fields)]
    if table.missing:
        lines += ["", f"not listed, because not installed: fields from {', '.join(table.missing)}"]
    return "\n".join([*lines, "", examples.rstrip()])


def _option(field: Field) -> str:
    flag = f"  --{field.name.replace('_', '-')}  {field.annotation}  [{field.default}]"
    if not field.help:
        return flag
    return f"{flag}\n{textwrap.indent(textwrap.fill(field.help, width=90), ' ' * 6)}"
