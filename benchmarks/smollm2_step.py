"""Seconds per optimizer step of SmolLM2-135M on GSM8K prompts, against TRL's GRPOTrainer.

`dppo compare` with a learning rate of 0, so that all methods roll out from the same policy; they
take turns, one step each. The bound is what rollout, packing (prompts computed once for their
completions) and pruning allow: t_rollout + t_score + t_train of the packed, unpruned run times the
share of its computed tokens that pruning leaves. Two rewards: "digits", which differs within nearly
every group, so that no completion is left out for free; and "math", the real one, with which most
groups are dead.

    python benchmarks/smollm2_step.py --data-dir DIR --json benchmarks/results/smollm2_step.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from dppo.cli.main import main as dppo

REWARDS = {"digits": "smollm2_step:digits", "math": "dppo.rewards:math_reward"}
VARIANCE = 0.2
"""Largest predicted inflation at which a rate is looked at."""


def digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where the digits of a completion add up to an odd number."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(sum(int(d) for d in text if d in "0123456789") % 2) for text in texts]


def compare(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    methods = ["grpo", "packing"]
    methods += [f"keep-{rate:g}=dppo,completion_keep={rate:g}" for rate in args.keep]
    options = {
        "model": args.model,
        "dataset": args.dataset,
        "reward": REWARDS[args.reward],
        "seeds": 1,
        "max-steps": args.steps,
        "eval-prompts": 2,
        "eval-every": args.steps,
        "final-samples": 1,
        "num-prompts": args.prompts * args.steps * 2,
        "num-generations": 8,
        "per-device-train-batch-size": 8,
        "gradient-accumulation-steps": args.prompts,
        "max-completion-length": args.tokens,
        "learning-rate": 0.0,
        "gradient-checkpointing": "false",
        "output-dir": folder,
        **({"data-dir": args.data_dir} if args.data_dir else {}),
        **({"prompt-column": args.prompt_column} if args.prompt_column else {}),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code = dppo(["compare", "--methods", *methods, *words])
    if code:
        sys.exit(code)
    return json.loads((Path(folder) / "comparison.json").read_text())


def judged(content: dict[str, Any]) -> dict[str, Any]:
    """The fastest rate within the variance, in numbers that do not depend on the machine."""
    rows = content["rows"]
    allowed = {
        name: row
        for name, row in rows.items()
        if name.startswith("keep-") and row["variance"] <= VARIANCE
    }
    if not allowed:
        sys.exit(f"no rate has a predicted variance of at most {VARIANCE}; give higher ones")
    name, row = min(allowed.items(), key=lambda item: item[1]["step_seconds"])
    base, packed = rows["grpo"]["phases"], rows["packing"]
    # Tokens that are computed, each prompt once for its completions: pruning completions leaves it.
    computed = row["kept_cost"] * packed["density"] / row["density"]
    bound = base["rollout"] + base["score"] + packed["phases"]["train"] * computed
    return {
        "method": name,
        "variance": row["variance"],
        "kept_cost": row["kept_cost"],
        "rollout_share_of_grpo": base["rollout"] / sum(base.values()),
        "speedup": row["step_speedup"],
        "computed_tokens_of_packed": computed,
        "bound_seconds": bound,
        "of_the_bound": bound / row["step_seconds"],
        "bound_speedup": rows["grpo"]["step_seconds"] / bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dataset", default="gsm8k")
    parser.add_argument("--data-dir", help="local copies of named data sets")
    parser.add_argument("--prompt-column", help="of a data set that is a file")
    parser.add_argument("--reward", choices=REWARDS, default="digits")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4, help="groups of 8 in a step")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.35, 0.25])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        content = compare(args, folder)
    content["judged"] = judged(content)
    content["command"] = "python benchmarks/smollm2_step.py " + " ".join(
        f"--{name.replace('_', '-')} {' '.join(map(str, v)) if isinstance(v, list) else v}"
        for name, v in vars(args).items()
        if v is not None and name not in {"json", "data_dir"}
    )
    print(json.dumps(content["judged"], indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
