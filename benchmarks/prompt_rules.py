"""Efficiency of the rules that choose prompts, in simulation.

Every prompt has a solve rate p ~ Beta(a, b). It is visited some times, G completions each; between
visits its logit moves by a normal step of the given size (drift). Then the rule chooses the window
of the next visit from the real `PromptHistory`, and the real `window_inclusion` solves pi. What the
next visit is worth is its probability of a gradient at the rate p it has by then,

    u = 1 - p^G - (1 - p)^G,

all rollouts cost the same, and the variance of the weighted gradient is counted as sum u / pi.

    efficiency at a rate    (sum u / keep) / (sum u / pi): variance of the uniform rule at the same
                            number of rollouts over that of the rule. Uniform: 1 by definition.
    progress per rollout    1 / ((1 + v) keep), relative to no pruning, with the extra variance
                            v = (sum u / pi - sum u) / sum u. Inserting v shows that it is the same
                            number, so that one table serves both questions; "best" is its largest
                            value over the rates, no pruning not among them.

That is the Poisson variance, conservative for the systematic design that draws windows. For
comparison, the calibrated optimum: sizes sqrt(E[u | counts]) under the true prior, which a history
could reach at best (drift 0 only); and the oracle: sizes sqrt(u).

    python benchmarks/prompt_rules.py --json benchmarks/results/prompt_rules.json
"""

import argparse
import itertools
import json

import numpy as np

from dppo.cli.origin import origin
from dppo.estimator.history import DISCOUNT, PromptHistory
from dppo.estimator.windows import prompt_sizes, threshold_prompt_sizes, window_inclusion

PRIORS = ((0.25, 0.2), (0.5, 0.5), (1.0, 1.0))
GROUPS = (5, 8, 16)
VISITS = (1, 2, 4, 8)
DRIFTS = (0.0, 0.5)
KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
SHOWN_KEEP = 0.6
PRUNE_RATES = (0.3, 0.5, 0.7, 0.9)
THRESHOLDS = tuple(f"threshold {rate}" for rate in PRUNE_RATES)
RULES = ("uniform", *THRESHOLDS, "proportional", "calibrated", "oracle")

LEAST_OF_UNIFORM = 0.99
MONTE_CARLO = 0.005
LEAST_OF_GAIN = 0.95
MANY_VISITS = 8


def signal(p, group):
    """Probability that the rewards of a group differ."""
    return 1 - p**group - (1 - p) ** group


def posterior_signal(a, b, group):
    """E[signal] for p ~ Beta(a, b)."""
    right, wrong = np.ones_like(a), np.ones_like(b)
    for j in range(group):
        right *= (a + j) / (a + b + j)
        wrong *= (b + j) / (a + b + j)
    return 1 - right - wrong


def simulate(setting, *, prompts, discount, seed):
    """History after the visits, all counts of right completions, signal of the next visit."""
    prior, group, visits, drift = setting
    rng = np.random.default_rng(seed)
    p = np.clip(rng.beta(*prior, size=prompts), 1e-6, 1 - 1e-6)
    logit = np.log(p / (1 - p))
    history = PromptHistory(discount=discount)
    right = np.zeros(prompts)
    for _ in range(visits):
        rewards = (rng.random((prompts, group)) < p[:, None]).astype(float)
        history.observe(np.arange(prompts), rewards)
        right += rewards.sum(axis=1)
        logit += drift * rng.standard_normal(prompts)
        p = 1 / (1 + np.exp(-logit))
    return history, right, signal(p, group)


def sizes_of_rules(history, right, truth, setting):
    """Size of every prompt by the name of the rule."""
    prior, group, visits, drift = setting
    ids = np.arange(truth.size)
    flat = np.ones(truth.size)
    magnitude, average = history.magnitude(ids)
    sizes = {"uniform": flat}
    for name, rate in zip(THRESHOLDS, PRUNE_RATES, strict=True):
        sizes[name] = threshold_prompt_sizes(magnitude, average, prune_rate=rate)
    sizes["proportional"] = prompt_sizes(*history.predict(ids, group=group))
    if drift == 0:
        wrong = visits * group - right
        best = posterior_signal(prior[0] + right, prior[1] + wrong, group)
        sizes["calibrated"] = prompt_sizes(best, flat)
    sizes["oracle"] = prompt_sizes(truth, flat)
    return sizes


def efficiency(size, truth, keep):
    """See the top of the file."""
    count = round(truth.size * keep)
    pi = window_inclusion(size, count=count)
    return float(truth.sum() * truth.size / count / (truth / pi).sum())


def measure(prior, group, visits, drift, options):
    """One row of the table: efficiency of each rule at each rate."""
    setting = (prior, group, visits, drift)
    history, right, truth = simulate(
        setting, prompts=options.prompts, discount=options.discount, seed=options.seed
    )
    sizes = sizes_of_rules(history, right, truth, setting)
    at = {
        name: {str(keep): efficiency(size, truth, keep) for keep in KEEPS}
        for name, size in sizes.items()
    }
    return {
        "prior": list(prior),
        "group": group,
        "visits": visits,
        "drift": drift,
        "efficiency": at,
        "best": {name: max(values.values()) for name, values in at.items()},
    }


def check(rows):
    """The three claims about the proportional rule, each with its worst case."""
    of_uniform = min(
        (value / row["efficiency"]["uniform"][keep], keep, describe(row))
        for row in rows
        for keep, value in row["efficiency"]["proportional"].items()
    )
    over_threshold = min(
        (row["best"]["proportional"] - row["best"][name], name, describe(row))
        for row in rows
        for name in THRESHOLDS
    )
    gains = {"best": [], str(SHOWN_KEEP): []}
    for row in rows:
        if row["visits"] == MANY_VISITS and row["drift"] == 0:
            for kind, shares in gains.items():
                value = row["best"] if kind == "best" else by_rule(row, kind)
                share = (value["proportional"] - 1) / (value["calibrated"] - 1)
                shares.append((share, describe(row)))
    return {
        "least share of uniform, any rate": [*of_uniform, of_uniform[0] >= LEAST_OF_UNIFORM],
        "least lead over threshold, best rates": [
            *over_threshold,
            over_threshold[0] >= -MONTE_CARLO,
        ],
        **{
            f"least share of the calibrated gain, {MANY_VISITS} visits, rate {kind}": [
                *min(shares),
                min(shares)[0] >= LEAST_OF_GAIN,
            ]
            for kind, shares in gains.items()
            if shares
        },
    }


def by_rule(row, keep):
    return {name: values[keep] for name, values in row["efficiency"].items()}


def describe(row):
    a, b = row["prior"]
    return f"Beta({a:g}, {b:g}), G={row['group']}, {row['visits']} visits, drift {row['drift']:g}"


def print_row(row, values, what):
    cells = [f"{values[name]:>6.3f}" if name in values else "     -" for name in RULES]
    a, b = row["prior"]
    print(
        f"{f'{a:g}, {b:g}':>9} {row['group']:>3} {row['visits']:>6} {row['drift']:>5g}"
        f" {what:>5} " + " ".join(cells),
        flush=True,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20_000, help="prompts per simulation")
    parser.add_argument("--discount", type=float, default=DISCOUNT, help="of the history")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)

    heads = ["unif", *(f"thr{rate:g}".replace("0.", ".") for rate in PRUNE_RATES)]
    heads += ["prop", "calib", "oracle"]
    print("    prior   G visits drift  keep " + " ".join(f"{head:>6}" for head in heads))
    rows = []
    for setting in itertools.product(PRIORS, GROUPS, VISITS, DRIFTS):
        row = measure(*setting, options)
        rows.append(row)
        print_row(row, by_rule(row, str(SHOWN_KEEP)), f"{SHOWN_KEEP:g}")
        print_row(row, row["best"], "best")
    checks = check(rows)
    print()
    for name, (*worst, holds) in checks.items():
        where = "; ".join(str(part) for part in worst[1:])
        print(f"{name}: {worst[0]:.4f} ({where}) {'ok' if holds else 'NOT REACHED'}")
    report = {
        "benchmark": "prompt_rules",
        "prompts": options.prompts,
        "discount": options.discount,
        "command": "python benchmarks/prompt_rules.py",
        "seeds": [options.seed],
        **origin(),
        "checks": checks,
        "results": rows,
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
