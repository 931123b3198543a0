"""`dppo eval`: how many problems of benchmarks models solve, side by side."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dppo.cli.files import write_json
from dppo.cli.job import check_folders
from dppo.cli.origin import origin
from dppo.cli.progress import ProgressReporter
from dppo.cli.rewards import load_rewards
from dppo.errors import ConfigurationError

SUMMARY = "greedy pass@1 and sampled pass@k of models on benchmarks, side by side"


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo eval`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: For whatever can be found wrong before a model is loaded.
    """
    args = _parser().parse_args(list(arguments))
    _check(args)
    for model in args.models:
        check_folders(model, str(args.output_dir))
    from dppo.evaluation.benchmarks import default_reward, load_benchmark
    from dppo.evaluation.records import check_settings

    benchmarks = [
        load_benchmark(
            name,
            load_rewards([args.reward or default_reward(name)])[0],
            limit=args.limit,
            seed=args.seed,
            data_dir=args.data_dir,
            chat=args.chat,
            system_prompt=args.system_prompt,
        )
        for name in args.benchmarks
    ]
    check_settings(args.output_dir, _settings(args))
    numbers = _evaluated(args, benchmarks)
    _report(args, numbers, command=shlex.join(["dppo", "eval", *arguments]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dppo eval", description=SUMMARY + ". See docs/evaluation.md.", allow_abbrev=False
    )
    add = parser.add_argument
    add("models", nargs="+", help="builtin, smollm2-135m, directories or hub names")
    add("--benchmarks", nargs="+", required=True, help="gsm8k, math500, ... or builtin")
    add("--data-dir", help="local copies of the benchmarks; the hub by default")
    add("--samples", type=int, default=0, help="sampled completions of each item, for pass@k")
    add("--k", type=int, nargs="+", help="of pass@k, at most --samples; by default 1 and all")
    add("--limit", type=int, help="items of each benchmark; all by default")
    add("--batch-size", type=int, default=16, help="completions generated at a time")
    add("--max-new-tokens", type=int, default=1024)
    add("--temperature", type=float, default=1.0, help="of the sampling")
    add("--system-prompt", help="of the conversations; '' for none")
    add("--chat", action=argparse.BooleanOptionalAction, help="prompts as conversations")
    add("--reward", help="module:function that scores; by default the benchmark's own")
    add("--seed", type=int, default=0)
    add("--output-dir", type=Path, default=Path("runs/eval"))
    return parser


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"{name} must be at least {least}, got {value}"
        for name, least in (("samples", 0), ("limit", 1), ("batch_size", 1), ("max_new_tokens", 1))
        if (value := getattr(args, name)) is not None and value < least
    ]
    if not args.temperature > 0:
        problems.append(f"temperature must be > 0, got {args.temperature}; greedy is always done")
    if args.k is None:
        args.k = sorted({1, args.samples}) if args.samples else []
    problems += [
        f"pass@{k} needs 1 <= k <= --samples, which is {args.samples}"
        for k in args.k
        if not 1 <= k <= args.samples
    ]
    for name, values in (("models", args.models), ("benchmarks", args.benchmarks)):
        twice = sorted(value for value in set(values) if values.count(value) > 1)
        problems += [f"{name}: {value} is there twice" for value in twice]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What records depend on; more models, benchmarks, items or k may be asked for later."""
    names = ("samples", "max_new_tokens", "temperature", "system_prompt", "chat", "reward", "seed")
    return {name: getattr(args, name) for name in names}


def _evaluated(args: argparse.Namespace, benchmarks: list[Any]) -> dict[str, dict[str, Any]]:
    from dppo.cli.runner import readable_output
    from dppo.evaluation.generate import ModelPolicy
    from dppo.evaluation.records import RecordFile
    from dppo.evaluation.results import measure
    from dppo.evaluation.run import Settings, evaluate_benchmark
    from dppo.tasks.models import load_policy

    names = ("samples", "max_new_tokens", "temperature", "batch_size", "seed")
    settings = Settings(**{name: getattr(args, name) for name in names})
    numbers: dict[str, dict[str, Any]] = {}
    where = {"phase": "load"}
    reporter = ProgressReporter(phase=lambda: where["phase"])
    with readable_output(), reporter:
        for model in args.models:
            policy = ModelPolicy(*load_policy(model))
            for benchmark in benchmarks:
                where["phase"] = f"{model}, {benchmark.name}"
                file = RecordFile(args.output_dir / folder_name(model) / f"{benchmark.name}.jsonl")
                total = len(benchmark.items) * len(settings.modes)
                reporter.start_stage("item", total=total)
                evaluate_benchmark(policy, benchmark, settings, file=file, advance=reporter.advance)
                reporter.finish_stage()
                numbers.setdefault(model, {})[benchmark.name] = measure(
                    file.records, [item.number for item in benchmark.items], args.k
                )
    return numbers


def folder_name(model: str) -> str:
    """A model's directory among the results.

    Example:
        >>> folder_name("Qwen/Qwen3-4B"), folder_name("./runs/train/")
        ('Qwen--Qwen3-4B', 'runs--train')
    """
    parts = [part for part in Path(model).parts if part not in {"/", ".", ".."}]
    return "--".join(parts) or "model"


def _report(args: argparse.Namespace, numbers: dict[str, dict[str, Any]], *, command: str) -> None:
    from dppo.evaluation.results import as_json, table

    content = {"command": command, **origin(), "settings": _settings(args)}
    write_json(args.output_dir / "eval.json", {**content, "models": as_json(numbers)})
    print("\n" + "\n".join(table(numbers)))
    print(f"files    {args.output_dir}")
