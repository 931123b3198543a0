"""`DPPOConfig`: `GRPOConfig` plus what to prune."""

import logging
from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from dppo.config import PruneConfig, parse_keep
from dppo.errors import ConfigurationError
from dppo.estimator.windows import window_size
from dppo.trl import config_checks

__all__ = ["DPPOConfig"]

logger = logging.getLogger(__name__)

PACKINGS = ("auto", "varlen", "bucket", "none")
OVERLONG = ("error", "drop")


@dataclass
class DPPOConfig(GRPOConfig):
    r"""Configuration of [`DPPOTrainer`]: everything `GRPOConfig` takes, and the fields below.

    > Parameters that control pruning

    Parameters:
        completion_keep (`float` or `str`, *optional*, defaults to `"auto"`):
            Expected share of the live training cost that is kept. `"auto"` chooses it while
            training, from 0.5 on: the rate of a grid with the highest predicted progress per
            second, given measured times and the variance that each rate would add; at most one
            notch in 5 steps. `1.0` switches pruning off; with
            `packing="none"` the host's own code then runs, bit for bit. `"shadow"` decides and logs
            what a rate of 0.5 would save, but trains on everything; `"shadow:0.25"` tries another
            rate. The rules `"threshold"` and `"inert"` have no use for the rate itself.
        auto_cost (`str`, *optional*, defaults to `"time"`):
            What `"auto"` goes by. `"time"`: seconds, so that two runs need not have the same rates.
            `"tokens"`: a generated token costs what a trained one does; deterministic.
        completion_keep_replay (`str`, *optional*):
            Path of the `metrics.jsonl` or `trainer_state.json` of a run whose rates `"auto"`
            repeats, so that the run can be repeated.
        completion_rule (`str`, *optional*, defaults to `"proportional"`):
            `"proportional"` to the assumed gradient norm per square root of cost; `"threshold"`,
            the paper's rule; `"uniform"`; `"inert"`, lossless: only completions without a gradient
            are left out. `completion_keep` sets the rate of the first and third.
        completion_prune_rate (`float`, *optional*, defaults to `0.7`):
            The paper's r_o, for `completion_rule="threshold"`.
        sampling_design (`str`, *optional*, defaults to `"systematic"`):
            `"systematic"` or `"poisson"`.
        prompt_keep (`float`, *optional*, defaults to `1.0`):
            Share of the candidate prompts that is rolled out: the K prompts of a generation are
            drawn from a window of M = floor(K / prompt_keep + 1/2), by what their past visits
            promise. `1.0`: the host's sampler, which rolls out all. K is what is rolled out; to
            compare with a run at batch B, configure K = prompt_keep * B.
        prompt_rule (`str`, *optional*, defaults to `"proportional"`):
            `"proportional"` to the predicted gradient norm per square root of cost; `"threshold"`,
            the paper's rule; `"uniform"`.
        prompt_prune_rate (`float`, *optional*, defaults to `0.5`):
            The paper's r_q, for `prompt_rule="threshold"`.
        prompt_id_column (`str`, *optional*):
            Column that names a prompt, a whole number or a text, by which its visits are
            remembered. Default: a hash of the prompt, so that equal prompts share a history.
        prompt_prior_column (`str`, *optional*):
            Column with the solve rate in [0, 1] that is believed of each prompt beforehand, worth
            one visit (two, where rewards have more than two values).
        allow_single_epoch (`bool`, *optional*, defaults to `False`):
            Allow `prompt_keep < 1` though no prompt is visited twice, so that nothing is known of
            any and the draw is uniform.
        prune_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps at the start in which nothing is pruned. Source: InfoBatch (Qin et al.,
            2024), whose first epoch has no history either.
        prune_until (`float`, *optional*, defaults to `1.0`):
            Share of the optimizer steps after which nothing is pruned any more; InfoBatch takes
            0.875. A generation goes by the step that it begins in. Where nothing is pruned, every
            completion with a gradient is trained on and a window is its K prompts; the number of
            steps stays what it was.
        reward_failures (`str`, *optional*, defaults to `"raise"`):
            Where a reward function raises: `"raise"` stops the run and names the prompt, `"skip"`
            leaves those completions without a score (`dppo/rewards/failed`), and out of training.
        reward_failure_limit (`int`, *optional*, defaults to `10`):
            With `"skip"`: calls in a row that fail on every completion, until the run stops.
        signal_reward (`str`, *optional*):
            Name of a reward function. Groups whose completions all get the same score from it have
            advantage 0, whatever the other rewards say: length or format shaping then cannot make a
            signal of an all-wrong group. This changes the objective, also with pruning off.
        packing (`str`, *optional*, defaults to `"auto"`):
            How the completions of an optimizer step share its forward passes, also with pruning
            off. `"varlen"` lays them end to end in dense rows, almost without padding, and computes
            a prompt once for its completions where that is cheaper; whether the model keeps them
            apart is checked at start, and if it does not `"bucket"` is used, which sorts them by
            length. `"none"` leaves them in random order, and with pruning off the host's own code
            runs, bit for bit. `"auto"` is `"varlen"`, except that with pruning off it leaves alone
            what would be trained otherwise (`top_entropy_quantile`, adaptive entropy, a router's
            auxiliary loss), and images.
        packing_capacity (`int`, *optional*):
            Tokens of a packed micro-batch, which takes as many completions as fit. Default: what
            a padded micro-batch of the generation would hold, so that packing takes no more memory.
        packing_window (`int`, *optional*, defaults to `64`):
            How many rows the packer sees at once.

        record_rollouts (`str`, *optional*):
            Path of an .npz file for rewards, advantages, lengths and surprisal of all completions,
            which `dppo audit` reads; written at checkpoints and at the end.
        record_gradients (`int`, *optional*):
            Record each completion's gradient too, sketched to this many numbers (1024, say), before
            its generation is trained on. One backward pass for each: for small models.
        audit_step (`int`, *optional*):
            Before this optimizer step, from 1, its pruning is drawn again and compared with the
            full gradient: `dppo/audit/*` and `audit_step_<N>.json`. Training is as without it.
        audit_redraws (`int`, *optional*, defaults to `32`):
            How often.

    > Parameters that control the prompts

    Parameters:
        max_prompt_length (`int`, *optional*):
            Longest prompt in tokens, chat template included. Default: what the model's context
            leaves beside `max_completion_length`, where the model states a context.
        overlong_prompts (`str`, *optional*, defaults to `"error"`):
            `"error"` refuses a data set with a longer prompt before training, `"drop"` leaves
            those prompts out and says how many.

    Raises:
        ConfigurationError: A value is outside its range, or the loss cannot be pruned exactly.

    Example:
        >>> from dppo.trl import DPPOConfig
        >>> DPPOConfig("out", completion_keep=0.25, report_to="none").completion_rule
        'proportional'
    """

    # Typed like the host's own `dict | str | None` fields, so that its argument parser reads text.
    completion_keep: float | str | None = field(
        default="auto",
        metadata={
            "help": "Expected share of the live training cost that is kept, in (0, 1]. 'auto': "
            "chosen while training. 1.0: pruning off. 'shadow' or 'shadow:0.25': decide and log "
            "what that rate (0.5) would save, but train on everything."
        },
    )
    auto_cost: str = field(
        default="time",
        metadata={
            "help": "What completion_keep='auto' goes by: 'time', measured seconds, or 'tokens', "
            "which is deterministic."
        },
    )
    completion_keep_replay: str | None = field(
        default=None,
        metadata={
            "help": "metrics.jsonl or trainer_state.json of a run whose rates "
            "completion_keep='auto' repeats."
        },
    )
    completion_rule: str = field(
        default="proportional",
        metadata={"help": "'proportional', 'threshold' (the paper's), 'uniform' or 'inert'."},
    )
    completion_prune_rate: float = field(
        default=0.7, metadata={"help": "The paper's r_o, for completion_rule='threshold'."}
    )
    sampling_design: str = field(
        default="systematic", metadata={"help": "'systematic' or 'poisson'."}
    )
    prompt_keep: float = field(
        default=1.0,
        metadata={
            "help": "Share of candidate prompts rolled out: K are drawn from a window of "
            "floor(K / prompt_keep + 1/2). 1.0: all of them."
        },
    )
    prompt_rule: str = field(
        default="proportional",
        metadata={"help": "'proportional', 'threshold' (the paper's) or 'uniform'."},
    )
    prompt_prune_rate: float = field(
        default=0.5, metadata={"help": "The paper's r_q, for prompt_rule='threshold'."}
    )
    prompt_id_column: str | None = field(
        default=None,
        metadata={"help": "Column that names a prompt. Default: a hash of the prompt."},
    )
    prompt_prior_column: str | None = field(
        default=None,
        metadata={"help": "Column with the solve rate believed of each prompt, in [0, 1]."},
    )
    allow_single_epoch: bool = field(
        default=False,
        metadata={"help": "Allow prompt_keep < 1 though no prompt is visited twice."},
    )
    prune_warmup_steps: int = field(
        default=0, metadata={"help": "Optimizer steps at the start in which nothing is pruned."}
    )
    prune_until: float = field(
        default=1.0,
        metadata={"help": "Share of the optimizer steps after which nothing is pruned any more."},
    )
    signal_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of a reward function whose constant groups get advantage 0, whatever the "
            "other rewards say. Changes the objective, also with pruning off."
        },
    )
    packing: str = field(
        default="auto",
        metadata={
            "help": "'varlen' (and 'auto'): completions lie end to end, without padding, and share "
            "their prompt; 'bucket': sorted by length; 'none': at random."
        },
    )
    packing_capacity: int | None = field(
        default=None,
        metadata={"help": "Tokens of a packed micro-batch. Default: those of a padded one."},
    )
    packing_window: int = field(default=64, metadata={"help": "Rows that the packer sees at once."})
    reward_failures: str = field(
        default="raise",
        metadata={"help": "Where a reward function raises: 'raise', or 'skip' those completions."},
    )
    reward_failure_limit: int = field(
        default=10, metadata={"help": "Calls in a row that may fail on every completion."}
    )
    record_rollouts: str | None = field(
        default=None,
        metadata={
            "help": "Write rewards, lengths and surprisal of all completions to this .npz file, "
            "for dppo audit."
        },
    )
    record_gradients: int | None = field(
        default=None,
        metadata={"help": "Record completions' gradients too, sketched to this many numbers."},
    )
    audit_step: int | None = field(
        default=None,
        metadata={"help": "Optimizer step whose pruning is redrawn to see if it is unbiased."},
    )
    audit_redraws: int = field(default=32, metadata={"help": "How often audit_step draws again."})
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest prompt in tokens, chat template included. Default: the model's "
            "context minus max_completion_length."
        },
    )
    overlong_prompts: str = field(
        default="error",
        metadata={"help": "'error' or 'drop': what to do with longer prompts, before training."},
    )

    def __post_init__(self) -> None:
        """Check the fields of this class, then the host's; then that the two fit together."""
        mode, rate = parse_keep("completion_keep", self.completion_keep)
        if mode in {"on", "off"}:  # from a command line it may be text
            self.completion_keep = rate
        config_checks.one_of("packing", self.packing, PACKINGS)
        config_checks.check_auto(self)
        for name in ("packing_window", "packing_capacity", "reward_failure_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: must be >= 1")
        config_checks.one_of("overlong_prompts", self.overlong_prompts, OVERLONG)
        config_checks.one_of("reward_failures", self.reward_failures, ("raise", "skip"))
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ConfigurationError(f"max_prompt_length={self.max_prompt_length}: must be >= 1")
        if self.bf16 is None and not self.fp16 and not config_checks.has_accelerator():
            self.bf16 = False
            self.dataloader_pin_memory = False  # there is nothing to pin it for
            logger.info("no accelerator found: training in float32 (set bf16=True to override)")
        super().__post_init__()
        self.prune_config()
        config_checks.check_annealing(self)
        config_checks.check_recording(self)
        config_checks.check_audit(self)
        if self.prunes or self.packs_unpruned:
            config_checks.check_exact(self)
        if self.prunes_prompts:
            config_checks.check_prompt_phase(self)

    @classmethod
    def paper(
        cls,
        output_dir: str | None = None,
        *,
        prompt_prune_rate: float = 0.5,
        completion_prune_rate: float = 0.5,
        **options: Any,
    ) -> "DPPOConfig":
        """The paper's two rules (arXiv 2603.04135), corrected to be exact.

        The paper's: a prompt whose past mean |A| is below average is pruned with probability r_q;
        of its completions those with |A| below the group's mean, with probability r_o; what is left
        is weighted by 1 / (1 - r). Corrected: its algorithm drops a fixed number of them, which is
        not what that weight belongs to, and divides by what is left; here every one has its
        probability, and the denominator is the full batch's.

        Unknown: the paper's public pages name no r_q, r_o, window, warm-up or annealing, only
        that the variance stays bounded up to rates of 0.7. Ours: both rates 0.5; windows of which
        exactly K prompts are rolled out, `prompt_keep` = 1 - r_q / 2, which is what r_q leaves when
        half of the prompts are below average; no warm-up (without a history the draw is uniform)
        and no annealing (`prune_until=1.0`).

        Args:
            output_dir: As for the class.
            prompt_prune_rate: r_q, in [0, 1); 0 leaves prompts alone.
            completion_prune_rate: r_o, in [0, 1); 0 leaves out inert completions only.
            **options: All other fields.

        Raises:
            ConfigurationError: As the class does.

        Example:
            >>> from dppo.trl import DPPOConfig
            >>> args = DPPOConfig.paper("out", prompt_prune_rate=0.4, report_to="none")
            >>> args.prompt_rule, args.prompt_keep
            ('threshold', 0.8)
        """
        given = {
            "completion_rule": "threshold",
            "completion_prune_rate": completion_prune_rate,
            "prompt_rule": "threshold",
            "prompt_prune_rate": prompt_prune_rate,
            "prompt_keep": 1 - prompt_prune_rate / 2,
        }
        return cls(output_dir, **{**given, **options})

    @property
    def prunes_completions(self) -> bool:
        """Whether completions are pruned; not in shadow mode."""
        return self.completion_keep != 1 and not self.shadows

    @property
    def shadows(self) -> bool:
        """Whether pruning of completions is decided and logged, but not done."""
        return parse_keep("completion_keep", self.completion_keep)[0] == "shadow"

    @property
    def chooses_keep(self) -> bool:
        """Whether the rate is chosen while training; not for rules that have none."""
        rated = self.completion_rule in {"proportional", "uniform"}
        return self.completion_keep == "auto" and rated

    @property
    def prunes_prompts(self) -> bool:
        """Whether prompts are drawn from a window of candidates."""
        return self.prompt_keep != 1

    @property
    def prunes(self) -> bool:
        """Whether anything is pruned; not in shadow mode."""
        return self.prunes_completions or self.prunes_prompts

    @property
    def packs_unpruned(self) -> bool:
        """Whether rows are to be packed though nothing is pruned.

        "auto" leaves alone what packing would change, as pruning would; by name it is refused.
        """
        if self.completion_keep != 1.0 or self.prunes_prompts or self.packing == "none":
            return False
        return self.packing != "auto" or not config_checks.couples_rows(self)

    @property
    def decides(self) -> bool:
        """Whether pruning is decided, if only to log it."""
        return self.completion_keep != 1.0 or self.prunes_prompts

    @property
    def prompts_per_generation(self) -> int:
        """Prompts rolled out in a generation, K, all ranks."""
        assert self.generation_batch_size is not None  # the host fills it in
        return self.generation_batch_size // self.group_size

    @property
    def group_size(self) -> int:
        """Completions of a prompt, G."""
        assert self.num_generations is not None
        return self.num_generations

    @property
    def batches_per_generation(self) -> int:
        """Batches of the loader, or micro-steps, that one generation serves."""
        return self.generation_steps * self.num_iterations

    @property
    def candidates_per_generation(self) -> int:
        """Prompts of a window, M."""
        return window_size(self.prompts_per_generation, keep=self.prompt_keep)

    @property
    def order_seed(self) -> int:
        """What the order of the prompts depends on."""
        return self.seed if self.data_seed is None else self.data_seed

    def keep_at(self, step: int, max_steps: int) -> float | None:
        """1.0 where nothing is pruned in an optimizer step, None where the configured rates hold.

        Args:
            step: Of the optimizer, from 0.
            max_steps: Of the run.
        """
        over = self.prune_until < 1 and step >= self.prune_until * max_steps
        return 1.0 if over or step < self.prune_warmup_steps else None

    @property
    def generation_steps(self) -> int:
        """`steps_per_generation`, which the host fills in."""
        assert self.steps_per_generation is not None
        return self.steps_per_generation

    @property
    def column_multiple(self) -> int | None:
        """`pad_to_multiple_of`, text and "auto" resolved by the host."""
        assert not isinstance(self.pad_to_multiple_of, str)
        return self.pad_to_multiple_of

    def prune_config(self) -> PruneConfig:
        """The options of the `Pruner`."""
        return PruneConfig(
            completion_keep=parse_keep("completion_keep", self.completion_keep)[1],
            completion_rule=self.completion_rule,
            completion_prune_rate=self.completion_prune_rate,
            sampling_design=self.sampling_design,
            prompt_keep=self.prompt_keep,
            prompt_rule=self.prompt_rule,
            prompt_prune_rate=self.prompt_prune_rate,
            advantage_scale=str(self.scale_rewards) if self.prunes_prompts else "group",
            observation_lag=self.observation_lag if self.prunes_prompts else 0,
        )

    @property
    def observation_lag(self) -> int:
        """Generations that the loader works ahead, see `lag`."""
        return self.lag(self.dataloader_num_workers)

    def lag(self, workers: int) -> int:
        """Generations that a loader with `workers` works ahead: no window can wait for them.

        One generation serves R = steps_per_generation * num_iterations batches of the loader. The
        trainer fetches the batches of an optimizer step (A of them) before it runs the first, the
        loader one more, its workers W * prefetch. So the window of generation g, whose first batch
        is number g R, is asked for before micro-step floor((g R - 1 - W * prefetch) / A) A.
        """
        batches = self.batches_per_generation
        accumulation = self.gradient_accumulation_steps
        ahead = workers * (self.dataloader_prefetch_factor or 2)
        lag = 0
        # It repeats after `accumulation` generations, once the start is over.
        for window in range(1, 2 * accumulation + ahead // batches + 3):
            micro_step = (window * batches - 1 - ahead) // accumulation * accumulation
            rolled_out = -(-max(micro_step, 0) // batches)
            lag = max(lag, window - rolled_out)
        return lag
