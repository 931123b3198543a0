"""`dppo verl`: data sets in verl's layout, and the summary of a run of verl's."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo.cli.data import BUILTIN, load_prompts, prompt_options
from dppo.cli.fields import RUN_OPTIONS, Field
from dppo.cli.options import read_settings
from dppo.cli.summary import make_summary, summary_lines
from dppo.errors import ConfigurationError
from dppo.tasks import builtin_path

if TYPE_CHECKING:
    from dppo.cli.evaluate import Evaluation

SUMMARY = "for verl: write a data set in its layout, or print the summary of a run"
EXAMPLES = """\
examples:
  dppo verl data --dataset gsm8k --output-dir data/gsm8k
  dppo verl data --dataset problems.jsonl --prompt-column question --answer-column solution \\
      --output-dir data/mine
  dppo verl summary runs/verl-prune_sync
"""
OUTPUT = Field("output_dir", "str", "data", "folder for train.parquet and test.parquet")
OPTIONS = {
    **{
        name: RUN_OPTIONS[name]
        for name in (
            *("dataset", "prompt_column", "answer_column", "data_dir", "system_prompt"),
            *("num_prompts", "eval_prompts"),
        )
    },
    "output_dir": OUTPUT,
    "seed": Field("seed", "int", 0, "of which prompts are held out"),
}
PHASES = ("rollout", "score", "prune", "train")
REASONS = "dppo/dropped/"


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: The words after `dppo verl`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: For bad options, or a run that logged nothing.
    """
    if arguments and arguments[0] == "data":
        return write_data(arguments[1:])
    if len(arguments) == 2 and arguments[0] == "summary":
        print("\n".join(summary_lines(summary_of(Path(arguments[1])))))
        return 0
    raise ConfigurationError(
        f"dppo verl takes `data [options]` or `summary FOLDER`, got {' '.join(arguments) or 'none'}"
    )


def write_data(arguments: Sequence[str]) -> int:
    """Writes train.parquet and test.parquet.

    Args:
        arguments: The options.
    """
    given = read_settings(arguments, run_options=OPTIONS)
    if given.config:
        raise ConfigurationError(f"dppo verl data has no option {', '.join(sorted(given.config))}")
    options = {name: field.default for name, field in OPTIONS.items()} | given.run
    name = options["dataset"]
    prompts = load_prompts(name, **prompt_options(options), chat=True, seed=options["seed"])
    folder = Path(options["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    source = "dppo/sorting" if name == BUILTIN else f"dppo/{Path(name).stem}"
    for split, rows in (("train", prompts.train), ("test", prompts.held_out)):
        if rows is not None:
            path = folder / f"{split}.parquet"
            verl_rows(rows, source=source, split=split).to_parquet(str(path))
            print(f"{path}: {len(rows):,} rows")
    if name == BUILTIN:
        print(f"{_builtin_model(folder / 'model')}: the model that reads them")
    return 0


def _builtin_model(folder: Path) -> Path:
    """A copy of the built-in model as verl expects a Qwen3: it reads any text and ends turns.

    verl looks for Qwen's end of a turn, and tries a line break on the tokenizer.
    """
    shutil.copytree(builtin_path(), folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<eos>", "<|im_end|>")
        content = json.loads(text)
        if "model" in content:
            content["model"]["unk_token"] = content["padding"]["pad_token"]
        (folder / name).write_text(json.dumps(content, indent=2))
    return folder


def verl_rows(rows: Any, *, source: str, split: str) -> Any:
    """Rows in verl's layout, each with an index that stays.

    Args:
        rows: With `prompt`, a conversation, and `answer`.
        source: What the reward is chosen by.
        split: Of the rows.

    Raises:
        ConfigurationError: There is no `answer`.
    """
    if "answer" not in rows.column_names:
        raise ConfigurationError(
            f"the data set has no column 'answer'; it has {', '.join(rows.column_names)}. Name "
            "the one with the answers: --answer-column NAME"
        )

    def laid_out(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {
            "data_source": source,
            "prompt": row["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
            "extra_info": {"index": index, "split": split},
        }

    return rows.map(laid_out, with_indices=True, remove_columns=rows.column_names)


def summary_of(folder: Path) -> dict[str, Any]:
    """What `dppo train` would say of a run that verl logged.

    Args:
        folder: With `metrics.jsonl` (the `file` backend of verl's logger) and, where it evaluated,
            `validation/STEP.jsonl`.

    Raises:
        ConfigurationError: There are no steps in it.
    """
    path = folder / "metrics.jsonl"
    try:
        logs = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    steps = [log["data"] for log in logs if "dppo/tokens/generated" in log["data"]]
    if not steps:
        raise ConfigurationError(f"{path} has no step of trainer mode prune_sync")

    # verl's loss keeps its name where it is of all completions: in shadow mode.
    pruned = [step for step in steps if "actor/pg_loss" not in step]

    def total(name: str, of: list[dict[str, Any]] = steps) -> float:
        return sum(float(step.get(name, 0.0)) for step in of)

    reasons = {name for step in pruned for name in step if name.startswith(REASONS)}
    generated = total("dppo/tokens/generated")
    left_out = total("dppo/tokens/generated", pruned) - total("dppo/tokens/trained", pruned)
    ess = [step["dppo/weight/ess"] for step in pruned if "dppo/weight/ess" in step]
    found = sorted(folder.glob("validation/*.jsonl"), key=lambda file: int(file.stem))
    rolled_out = total("dppo/prompts/rolled_out")
    totals = {
        "completion_tokens_generated": round(generated),
        "completion_tokens_trained": round(generated - left_out),
        "completion_tokens_skipped": {},
        "completions_dropped": {
            name[len(REASONS) :]: total(name, pruned) for name in sorted(reasons)
        },
        "prompts_candidates": round(total("dppo/prompts/candidates")),
        "prompts_rolled_out": round(rolled_out),
        "effective_sample_size": statistics.fmean(ess) if ess else None,
        "seconds": {phase: total(f"dppo/time/{phase}") for phase in PHASES},
    }
    return make_summary(
        totals,
        before=_evaluation(found[0]) if found else None,
        after=_evaluation(found[-1]) if len(found) > 1 else None,
        steps=len(steps),
        wall_seconds=total("timing_s/step"),
        interrupted=False,
        resumed_from=None,
        config={},
    )


def _evaluation(path: Path) -> Evaluation:
    from dppo.cli.evaluate import Evaluation

    scores = [float(json.loads(line)["score"]) for line in path.read_text().splitlines()]
    error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    return Evaluation(statistics.fmean(scores), error, count=len(scores), unscored=0)
