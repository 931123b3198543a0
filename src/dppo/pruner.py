"""The pruner: composes the statistics into one decision, knows no framework.

rewards -> advantages -> norms -> sizes -> inclusion probabilities -> design -> selection, once
for every optimizer step that a generation feeds, each with a draw of its own.

Suffixes: `_P` prompts, `_PG` prompts x group, `_N` flat rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dppo._batch import (
    DROP_REASONS,
    Batch,
    count_reasons,
    make_batch,
    optimizer_steps,
    prompt_inclusion,
)
from dppo._checks import Bools, Floats, Ints, natural, share
from dppo._prompt_phase import PromptIds, PromptPhase
from dppo.config import PruneConfig
from dppo.errors import ConfigurationError, InvalidInputError
from dppo.estimator.designs import (
    generator,
    poisson_kept,
    stratified_order,
    systematic_kept,
)
from dppo.estimator.diagnostics import effective_sample_size, pruning_variance
from dppo.estimator.inclusion import (
    proportional_inclusion,
    threshold_inclusion,
    uniform_inclusion,
)
from dppo.estimator.sizes import completion_norms
from dppo.estimator.weights import two_phase_inclusion
from dppo.types import CompletionChoice, Selection

__all__ = ["DROP_REASONS", "Pruner"]


class Pruner:
    """Decides which completions are trained on, and remembers what it decided for the metrics.

    Args:
        config: The options.
        seed: Of every draw, >= 0. Decisions are a pure function of it and of the arguments of the
            call, so ranks and resumed runs agree without exchanging random state.

    Example:
        >>> import dppo
        >>> pruner = dppo.Pruner(dppo.PruneConfig(completion_keep=0.5), seed=0)
        >>> choice = pruner.select_completions([[1.0, 0.0, 0.0, 1.0]], step=0)
        >>> int(choice.kept.sum()), choice.weight.max().item()
        (2, 2.0)
    """

    def __init__(self, config: PruneConfig, *, seed: int) -> None:
        self.config = config
        self.seed = natural("seed", seed)
        self._prompts = PromptPhase(config, seed=self.seed)
        self._metrics: list[dict[str, float]] = []
        self._metrics_step = -1
        self._latest: tuple[Batch, Floats, Ints] | None = None

    def window_size(self, count: int) -> int:
        """Candidates from which `count` prompts are drawn, floor(count / prompt_keep + 1/2)."""
        return self._prompts.window_size(count)

    def select_prompts(
        self,
        prompt_ids: PromptIds,
        *,
        count: int,
        step: int,
        keep: float | None = None,
        solve_rate: ArrayLike | None = None,
    ) -> Selection:
        """Choose exactly `count` of the candidate prompts to roll out, from their history.

        Args:
            prompt_ids: The candidates, `window_size(count)` of them: whole numbers below 2^63 or
                texts, the same for a prompt at every visit.
            count: Prompts to roll out.
            step: Generation counter. Uses what was observed in generations up to
                step - 1 - `observation_lag`, whenever it was reported.
            keep: In place of `prompt_keep` for this generation, in (0, 1], as in annealing; the
                window then has floor(count / keep + 1/2) candidates.
            solve_rate: Shape of `prompt_ids`, in [0, 1]. What is believed of each candidate
                beforehand, worth one visit (two, where rewards have more than two values).

        Returns:
            Selection over the candidates; exactly `count` are kept, every pi is above 0.

        Raises:
            InvalidInputError: The window has another size than `window_size(count)`.

        Example:
            >>> import dppo
            >>> pruner = dppo.Pruner(dppo.PruneConfig(prompt_keep=0.5), seed=0)
            >>> window = pruner.select_prompts(range(8), count=4, step=0)
            >>> int(window.kept.sum()), window.pi.tolist() == [0.5] * 8
            (4, True)
        """
        return self._prompts.select(
            prompt_ids, count=count, step=step, keep=keep, solve_rate=solve_rate
        )

    def observe(
        self,
        prompt_ids_kept: PromptIds,
        rewards_PG: ArrayLike,
        *,
        step: int,
        lengths_PG: ArrayLike | None = None,
    ) -> None:
        """Report the rewards of the prompts that were rolled out in generation `step`.

        Also without prompt pruning, so that it has a history when it is switched on.

        Args:
            prompt_ids_kept: One id for each row.
            rewards_PG: Shape (P, G). NaN means no score.
            step: Generation counter.
            lengths_PG: Shape (P, G). Completion tokens.

        Raises:
            InvalidInputError: Wrong shapes, or a window that should have used it is already chosen.
        """
        self._prompts.observe(prompt_ids_kept, rewards_PG, lengths_PG, step)

    def select_completions(
        self,
        rewards_PG: ArrayLike,
        *,
        step: int,
        advantages_PG: ArrayLike | None = None,
        prompts: Selection | None = None,
        surprisal_PG: ArrayLike | None = None,
        lengths_PG: ArrayLike | None = None,
        prompt_lengths_P: ArrayLike | None = None,
        live: ArrayLike | None = None,
        iteration: int = 0,
        optimizer_step_PG: ArrayLike | None = None,
        masked_PG: ArrayLike | None = None,
        dead_P: ArrayLike | None = None,
        advantage_floor: float = 0.0,
        denominator_PG: ArrayLike | None = None,
        keep: float | None = None,
    ) -> CompletionChoice:
        """Choose the completions to train on, with their inclusion probabilities and weights.

        Args:
            rewards_PG: Shape (P, G). NaN means no score.
            step: Generation counter.
            advantages_PG: Shape (P, G). The host's; used as they are, except that dead groups get
                exactly 0. Default: `group_advantages(rewards_PG)`.
            prompts: The selection of the candidate window these P prompts were kept from; the
                rows here are its kept prompts in window order. None: no prompt was pruned.
            surprisal_PG: Shape (P, G), see `surprisal_norm`. None: h = 1.
            lengths_PG: Shape (P, G). Completion tokens. None: rows cost the same.
            prompt_lengths_P: Shape (P,). Prompt tokens; needs `lengths_PG`.
            live: Shape (P, G). Rows with a gradient. Default: the advantage is not 0, or all rows
                if `advantage_floor` > 0. Masked rows never are.
            iteration: Pass over the generation.
            optimizer_step_PG: Shape (P, G), whole numbers: which optimizer step of this pass
                trains the row. Each has its own budget and its own independent draw.
            masked_PG: Shape (P, G). Rows without a token in the loss.
            dead_P: Shape (P,). Groups without signal, if not those whose rewards are constant.
            advantage_floor: See `completion_norms`.
            denominator_PG: See `completion_norms`.
            keep: In place of `completion_keep` for this generation, in (0, 1], as in annealing; at
                1 every live row is kept, whatever the rule.

        Raises:
            InvalidInputError: A shape, a value or a combination of arguments is wrong.
        """
        batch = make_batch(
            rewards_PG,
            advantages_PG=advantages_PG,
            lengths_PG=lengths_PG,
            prompt_lengths_P=prompt_lengths_P,
            live=live,
            masked_PG=masked_PG,
            dead_P=dead_P,
            advantage_floor=advantage_floor,
        )
        shape = batch.live_PG.shape
        pi_prompt_P = None if prompts is None else prompt_inclusion(prompts, shape[0])
        norm = completion_norms(
            batch.advantages_PG,
            surprisal=surprisal_PG,
            weight_P=None if pi_prompt_P is None else 1 / pi_prompt_P,
            advantage_floor=advantage_floor,
            live=batch.live_PG,
            denominator=denominator_PG,
        )
        step_of = optimizer_steps(optimizer_step_PG, shape)
        kept, pi = np.zeros(shape, dtype=np.bool_), np.zeros(shape)
        for optimizer_step in np.unique(step_of).tolist():
            rows = step_of == optimizer_step
            pi[rows] = self._inclusion(batch, norm, rows, keep)
            kept[rows] = self._draw(
                pi, batch.advantages_PG, rows, key=(step, iteration, optimizer_step)
            )
        if iteration == 0:
            self._latest = (batch, norm, step_of)
        reason = np.where(kept, -1, batch.reason_PG)
        both = pi if pi_prompt_P is None else two_phase_inclusion(pi_prompt_P, pi)
        selection = Selection(kept, both)
        choice = CompletionChoice(
            kept=selection.kept,
            pi=selection.pi,
            weight=selection.weight,
            pi_completion=pi,
            advantages=batch.advantages_PG,
            live=batch.live_PG,
            norm=norm,
            reason=reason,
            dropped=count_reasons(reason),
        )
        self._remember(step, choice, batch.cost_PG)
        return choice

    def prospects(self, rates: Sequence[float]) -> tuple[Floats, Floats]:
        """What other rates would do to the latest generation, in its first pass.

        Args:
            rates: Values of `completion_keep`.

        Returns:
            For each rate the variance that it would add (`pruning_variance`), and the expected
            share of the training cost that it would keep.

        Raises:
            InvalidInputError: No completions were chosen yet, or a rate is outside (0, 1].

        Example:
            >>> import dppo
            >>> pruner = dppo.Pruner(dppo.PruneConfig(), seed=0)
            >>> choice = pruner.select_completions([[1.0, 0.0], [1.0, 1.0]], step=0)
            >>> variance, cost = pruner.prospects([1.0, 0.5])
            >>> cost.tolist(), variance.tolist()
            ([0.5, 0.25], [0.0, 0.5])
        """
        if self._latest is None:
            raise InvalidInputError("no completions were chosen yet, so there is nothing to tell")
        batch, norm, step_of = self._latest
        variance, cost = np.zeros(len(rates)), np.zeros(len(rates))
        for place, rate in enumerate(rates):
            pi = np.zeros(norm.shape)
            for optimizer_step in np.unique(step_of).tolist():
                rows = step_of == optimizer_step
                pi[rows] = self._inclusion(batch, norm, rows, rate)
            variance[place] = pruning_variance(norm, pi, design=self.config.sampling_design)
            cost[place] = float((pi * batch.cost_PG).sum() / batch.cost_PG.sum())
        return variance, cost

    @property
    def earliest_observation(self) -> int:
        """The first generation that `observe` still takes: no window was chosen without it."""
        return self._prompts.earliest

    def visited(self, prompt_ids: PromptIds) -> Bools:
        """Which of the prompts the history knows, shape of `prompt_ids`."""
        return self._prompts.history.visited(prompt_ids)

    def metrics(self) -> dict[str, float]:
        """Metrics of the latest generation, averaged over its passes; empty before the first.

        `weight/ess` is missing if nothing was kept.
        """
        values: dict[str, list[float]] = {}
        for of_pass in self._metrics:
            for name, value in of_pass.items():
                values.setdefault(name, []).append(value)
        return {name: sum(of_passes) / len(of_passes) for name, of_passes in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """State: seed, options, and what is known of the prompts (arrays, if anything is).

        JSON-ready as long as no prompt was observed or chosen.
        """
        state = {"version": 1, "seed": self.seed, "config": self.config.to_dict()}
        return {**state, "prompts": self._prompts.state_dict()} if self._prompts.used else state

    def load_state_dict(self, state: Any) -> None:
        """Check that a saved state belongs to this pruner, and take over what it knows.

        Raises:
            ConfigurationError: The seed or an option differs; the message names it.
        """
        saved = _flat(state)
        mine = _flat(self.state_dict())
        changed = [
            f"{name} {saved.get(name)!r} -> {mine.get(name)!r}"
            for name in sorted(saved.keys() | mine.keys())
            if saved.get(name) != mine.get(name)
        ]
        if changed:
            raise ConfigurationError(
                "the saved pruning state belongs to another configuration: " + "; ".join(changed)
            )
        self._prompts = PromptPhase(self.config, seed=self.seed)
        if state.get("prompts") is not None:
            self._prompts.load_state_dict(state["prompts"])

    def _inclusion(self, batch: Batch, norm: Floats, rows: Bools, keep: float | None) -> Floats:
        """Inclusion probabilities of the rows of one optimizer step, flat."""
        rule = self.config.completion_rule
        if keep == 1 or rule == "inert":
            return uniform_inclusion(batch.live_PG[rows], keep=1.0)
        keep = self.config.completion_keep if keep is None else share("keep", keep)
        if rule == "threshold":
            return threshold_inclusion(
                batch.advantages_PG,
                prune_rate=self.config.completion_prune_rate,
                live=batch.live_PG,
                scored=batch.scored_PG,
            )[rows]
        if rule == "uniform":
            return uniform_inclusion(batch.live_PG[rows], keep=keep)
        cost = batch.cost_PG[rows]
        return proportional_inclusion(norm[rows] / np.sqrt(cost), keep=keep, cost=cost)

    def _draw(
        self, pi: Floats, advantages: Floats, rows: Bools, *, key: tuple[int, int, int]
    ) -> Bools:
        step, iteration, optimizer_step = key

        def rng(stream: str) -> np.random.Generator:
            return generator(
                self.seed, step, stream=stream, iteration=iteration, optimizer_step=optimizer_step
            )

        if self.config.sampling_design == "poisson":
            return poisson_kept(pi[rows], rng("completion"))
        order = stratified_order(advantages, rng("order"))
        order = order[rows.ravel()[order]]
        place = np.cumsum(rows.ravel()) - 1  # index among the rows of this step
        return systematic_kept(pi[rows], place[order], rng("completion"))

    def _remember(self, step: int, choice: CompletionChoice, cost: Floats) -> None:
        if step != self._metrics_step:
            self._metrics, self._metrics_step = [], step
        # The norm holds the prompt's weight already.
        weighted = choice.norm[choice.kept] / choice.pi_completion[choice.kept]
        live_cost = float(cost[choice.live].sum())
        kept_cost = float(cost[choice.kept].sum())
        of_pass = {
            "completions/live": float(choice.live.mean()),
            "completions/keep": float(choice.kept.mean()),
            "cost/keep": kept_cost / float(cost.sum()),
            "cost/keep_live": kept_cost / live_cost if live_cost else 1.0,
            "weight/max": float(choice.weight.max()),
            "variance/inflation": pruning_variance(
                choice.norm, choice.pi_completion, design=self.config.sampling_design
            ),
        }
        if weighted.size:
            of_pass["weight/ess"] = effective_sample_size(weighted) / weighted.size
        self._metrics.append(of_pass)


def _flat(state: Any) -> dict[str, Any]:
    """A pruner's state with the options on the level of the rest."""
    try:
        return {**state["config"], "seed": state["seed"], "version": state["version"]}
    except (KeyError, TypeError):
        raise ConfigurationError(f"not a saved state of a pruner: {state!r:.100}") from None
