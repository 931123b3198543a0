"""What can be compared: a trainer and the options that make the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dppo.cli.convert import convert
from dppo.cli.fields import Field, config_fields, nearest_name
from dppo.errors import ConfigurationError

BASELINE, REFERENCE = "grpo", "dppo"
"""What all are compared with; and which others are said to be behind or ahead of."""


@dataclass(frozen=True)
class Method:
    """One row of a comparison.

    Attributes:
        name: Of the row.
        trainer: "trl" (its `GRPOTrainer`, untouched), "dppo", or "peer" (`dppo.trl.peers`).
        options: Fields of the trainer's config that make the method.
        text: What it is.
        seeds: How many seeds; None: all.
    """

    name: str
    trainer: str
    options: dict[str, Any]
    text: str
    seeds: int | None = None


def _dppo(name: str, text: str, **options: Any) -> Method:
    return Method(name, "dppo", {"completion_keep": "auto", "packing": "auto", **options}, text)


def _peer(name: str, text: str) -> Method:
    return Method(name, "peer", {"peer": name, "packing": "auto"}, f"{text} (biased)")


METHODS = {
    method.name: method
    for method in (
        Method(BASELINE, "trl", {}, "TRL's GRPOTrainer, unmodified"),
        _dppo("dppo", "completions pruned at a rate chosen while training, survivors packed"),
        _dppo("packing", "packing alone", completion_keep=1.0),
        _dppo("pruning", "pruning alone", packing="none"),
        _dppo("dppo-unclipped", "dppo without gradient clipping", max_grad_norm=0.0),
        _dppo(
            *("paper", "the paper's completion rule, corrected, r = 0.5; packed"),
            completion_keep=0.5,
            completion_rule="threshold",
            completion_prune_rate=0.5,
        ),
        _peer("cppo", "CPPO, half of the batch by |A|; packed"),
        _peer("pods", "PODS, half of each group by reward variance; packed"),
        _peer("dapo", "DAPO's dynamic sampling; packed"),
        _peer("greso", "GRESO's skipping and dynamic sampling; packed"),
        _peer("algorithm-1", "the paper's Algorithm 1 to the letter, r = 0.5; packed"),
    )
}
PEER_FIELDS = {
    field.name: field for field in (Field("peer", "str", "cppo"), Field("peer_rate", "float", 0.5))
}


def read_methods(words: Sequence[str], given: Mapping[str, Any]) -> list[Method]:
    """Reads `--methods`.

    Args:
        words: Each NAME, or NAME=BASE,option=value,... of one's own; with @N at the end of NAME
            for N seeds only.
        given: Config fields set for all methods, none of which a method may set otherwise.

    Returns:
        The methods; the baseline first, if it was not named.

    Raises:
        ConfigurationError: A name or option is unknown, or set twice.

    Example:
        >>> [m.name for m in read_methods(["dppo", "quarter@2=dppo,completion_keep=0.25"], {})]
        ['grpo', 'dppo', 'quarter']
    """
    found = [_read(word) for word in words]
    if BASELINE not in [m.name for m in found]:
        found.insert(0, METHODS[BASELINE])
    names = [m.name for m in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"methods: {name} is there twice; rename one, as in b={name}")
    for method in found:
        for name in method.options.keys() & given.keys():
            raise ConfigurationError(
                f"{name} makes the method {method.name}; for another value make a method of your "
                f"own, as in mine={method.name},{name}={given[name]}"
            )
    return found


def _read(word: str) -> Method:
    head, equals, rest = word.partition("=")
    name, at, seeds = head.partition("@")
    base, *pairs = rest.split(",") if equals else [name]
    if base not in METHODS:
        near = nearest_name(base, list(METHODS))
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigurationError(f"methods: there is no {base!r}, only {', '.join(METHODS)}{hint}")
    if at and (not seeds.isdigit() or int(seeds) < 1):
        raise ConfigurationError(f"methods: {word!r}: the number of seeds after @ is {seeds!r}")
    method = METHODS[base]
    options = dict(method.options)
    known = config_fields().fields | (PEER_FIELDS if method.trainer == "peer" else {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in known or not equals:
            near = nearest_name(key, list(known))
            raise ConfigurationError(
                f"methods: {word!r}: {pair!r} is no option=value; did you mean {near}?"
            )
        options[key] = convert(known[key], value)
    text = method.text if name == base else f"{base} with {', '.join(pairs)}"
    return Method(name, method.trainer, options, text, int(seeds) if at else None)
