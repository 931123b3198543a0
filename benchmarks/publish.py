"""Writes the table and the figure of the comparison from benchmarks/results/compare.json.

The file is the comparison.json that `dppo compare` wrote; the table goes between two marks.

    python benchmarks/publish.py
"""

import json
import math
from pathlib import Path
from typing import Any

from dppo.cli.compare.pictures import pyplot

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compare.json"
FIGURE = ROOT / "docs" / "assets" / "compare.png"
MARKS = ("<!-- comparison: made by benchmarks/publish.py -->", "<!-- end of comparison -->")
PAGES = (ROOT / "README.md", ROOT / "docs" / "comparison.md")
BLACK, BLUE, ORANGE, GREY = "#000000", "#0072B2", "#D55E00", "#7F7F7F"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def signed(difference: dict[str, Any] | None) -> str:
    if difference is None or difference["low"] is None:
        return ""
    return f"{difference['mean']:+.3f} ({difference['low']:+.3f}, {difference['high']:+.3f})"


def interval(goal: dict[str, Any]) -> str:
    known = goal.get("interval", {})
    return "" if known.get("low") is None else f" ({known['low']:.2f}-{known['high']:.2f})"


def sooner(found: dict[str, Any] | None) -> str:
    if found is None or found["ratio"] is None:
        return ""
    return f"{found['ratio']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"


def table(rows: dict[str, Any]) -> list[str]:
    lines = [
        "| method | seeds | step, s | rollout | train | step faster | over bound | "
        "to target, steps | **time to target** | predicted | DPPO sooner | "
        "reward at the end, against GRPO |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        goal, base = row.get("to_target", {}), name == "grpo"
        fewer = goal.get("fewer", {}).get("seconds")
        steps = "never" if goal.get("steps") is None else f"{goal['steps']:.0f}"
        time = "" if fewer is None else f"**{fewer:.2f}x**" + ("" if base else interval(goal))
        cells = [
            f"`{name}`",
            str(len(row["seeds"])),
            number(row["step_seconds"], 3),
            number(row["phases"]["rollout"], 3),
            number(row["phases"]["train"], 3),
            f"{row['step_speedup']:.2f}x",
            number(row.get("over_bound")),
            steps,
            time,
            "" if row.get("predicted") is None else f"{row['predicted']:.2f}x",
            sooner(row.get("dppo_sooner")),
            number(row["final_reward"], 3) if base else signed(row.get("reward_difference")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(rows: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1.5, 1))
    shown = {"grpo": (BLACK, "TRL's GRPO"), "dppo": (BLUE, "DPPO"), "packing": (ORANGE, "packing")}
    for name, (colour, label) in shown.items():
        curve = rows[name]["curve"]
        left.plot(curve["seconds"], curve["reward"], color=colour, label=label, linewidth=2)
        left.fill_between(
            curve["seconds"], curve["low"], curve["high"], color=colour, alpha=0.12, linewidth=0
        )
    for name, row in rows.items():
        if name not in shown:
            curve = row["curve"]
            left.plot(curve["seconds"], curve["reward"], color=GREY, linewidth=0.6, alpha=0.7)
    left.axhline(rows["grpo"]["to_target"]["target"], color=GREY, linestyle=":", linewidth=1)
    left.set(xlabel="seconds of training", ylabel="held-out reward, mean over seeds")
    left.legend()
    names = [n for n in rows if rows[n].get("to_target", {}).get("fewer") and n != "grpo"][::-1]
    speed = [rows[n]["to_target"]["fewer"]["seconds"] for n in names]
    ours = {"dppo", "packing", "pruning", "dppo-unclipped", "paper"}
    bars = right.barh(names, speed, color=[BLUE if n in ours else GREY for n in names])
    right.bar_label(bars, [f"{value:.2f}x" for value in speed], padding=3)
    right.axvline(1, color=BLACK, linewidth=0.8)
    right.set(
        xlim=(0, math.ceil(max(speed) * 1.15 * 2) / 2),
        xlabel="times faster to the target than GRPO\n(blue: unbiased, grey: biased)",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def put(page: Path, lines: list[str]) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text("\n".join([f"{before}{MARKS[0]}", *lines, f"{MARKS[1]}{after}"]), "utf-8")


def main() -> None:
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    for page in PAGES:
        put(page, table(content["rows"]))
    draw(content["rows"], FIGURE)
    print(f"written: {', '.join(str(p.relative_to(ROOT)) for p in (*PAGES, FIGURE))}")


if __name__ == "__main__":
    main()
