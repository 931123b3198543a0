"""The batch arithmetic, by hand and against TRL and transformers."""

import math
from types import SimpleNamespace

import pytest

from dppo.cli.arithmetic import BatchSettings, batch_shape, legal_group_sizes, nearest_multiples
from dppo.cli.length import dead_group_probability, expected_trained, run_length
from dppo.errors import ConfigurationError


def test_three_processes_two_epochs():
    # 4 per device x 3 processes x 2 accumulation = 24 completions = 4 groups of 6 a step;
    # 8,000 / 4 = 2,000 steps an epoch, 2 epochs = 4,000 steps.
    settings = BatchSettings(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=6,
        num_train_epochs=2,
        num_processes=3,
    )
    shape = batch_shape(settings)
    length = run_length(settings, shape, 8000)
    assert shape.prompts_per_step == 4
    assert shape.completions_per_generation == 24
    assert length.total_steps == 4000
    assert length.completions_total == 4000 * 24
    assert length.unused_prompts_per_epoch == 0


def test_one_group_per_step():
    # Effective batch 8 = 1 group of 8: 128 steps an epoch, 3 epochs = 384.
    settings = BatchSettings()
    length = run_length(settings, batch_shape(settings), 128)
    assert length.steps_per_epoch == 128
    assert length.total_steps == 384


@pytest.mark.parametrize(("group_size", "percent"), [(2, 70.2), (8, 20.1), (16, 4.0)])
def test_dead_groups(group_size, percent):
    # G=2: 0.1819^2 + 0.8181^2 = 0.0331 + 0.6693 = 0.7024
    assert round(100 * dead_group_probability(0.1819, group_size), 1) == percent


def test_illegal_group_names_legal_sizes_and_nearest_batch():
    settings = BatchSettings(per_device_train_batch_size=4, num_generations=6)
    with pytest.raises(ConfigurationError) as caught:
        batch_shape(settings)
    message = str(caught.value)
    assert "legal group sizes for this batch: 2, 4" in message
    assert "per_device_train_batch_size 6 (generation batch 6)" in message


def test_nearest_legal_batch_is_legal():
    # 5 x 2 processes x 1 = 10, not a multiple of 8: per device 4 -> 8, the nearest (8 -> 16).
    settings = BatchSettings(per_device_train_batch_size=5, num_processes=2)
    with pytest.raises(ConfigurationError, match=r"size 4 \(generation batch 8\)"):
        batch_shape(settings)
    assert batch_shape(BatchSettings(per_device_train_batch_size=4, num_processes=2))


def test_explicit_generation_batch():
    shape = batch_shape(BatchSettings(generation_batch_size=32))
    assert shape.steps_per_generation == 4
    assert shape.prompts_per_generation == 4
    with pytest.raises(ConfigurationError, match="nearest legal: 8, 16"):
        batch_shape(BatchSettings(generation_batch_size=12))
    with pytest.raises(ConfigurationError, match="generation_batch_size 24"):
        batch_shape(BatchSettings(generation_batch_size=16, num_generations=12))
    with pytest.raises(ConfigurationError, match="only one of"):
        batch_shape(BatchSettings(generation_batch_size=32, steps_per_generation=4))


def test_all_bad_counts_are_reported_at_once():
    settings = BatchSettings(num_generations=1, num_iterations=0, max_steps=0, num_train_epochs=1)
    with pytest.raises(ConfigurationError) as caught:
        batch_shape(settings)
    assert len(str(caught.value).splitlines()) == 3


def test_remainder_and_too_few_prompts():
    settings = BatchSettings(per_device_train_batch_size=8, num_generations=2)  # 4 prompts
    shape = batch_shape(settings)
    assert run_length(settings, shape, 10).unused_prompts_per_epoch == 2
    with pytest.raises(ConfigurationError, match="3 prompts are fewer than one generation batch"):
        run_length(settings, shape, 3)


def test_length_without_prompts_needs_max_steps():
    settings = BatchSettings()
    assert run_length(settings, batch_shape(settings), None) is None
    settings = BatchSettings(max_steps=6, num_iterations=2)
    length = run_length(settings, batch_shape(settings), None)
    # 6 steps, 2 iterations over each generation of 8: 3 generations, 24 rollouts, 48 trained.
    assert (length.total_generations, length.completions_total, length.trained_total) == (3, 24, 48)
    assert length.steps_per_epoch is None


def test_expected_trained_completions():
    # 256 a step, a quarter kept: 64; with 20 % dead groups 256 x 0.8 x 0.25 = 51.2.
    assert expected_trained(256, keep=0.25, dead=0) == 64
    assert expected_trained(256, keep=0.25, dead=0.2) == pytest.approx(51.2)


def test_helpers():
    assert legal_group_sizes(24) == [2, 3, 4, 6, 8, 12, 24]
    assert nearest_multiples(4, 6) == [6]
    assert nearest_multiples(9, 6) == [6, 12]
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        dead_group_probability(1.5, 2)


CASES = [
    # per device, accumulation, group, iterations, steps per generation, epochs, max steps, prompts
    (8, 1, 8, 1, None, 3.0, -1, 128, 1),
    (4, 2, 6, 1, None, 2.0, -1, 8000, 3),
    (4, 2, 4, 1, None, 1.0, -1, 10, 1),
    (8, 1, 2, 1, None, 3.0, -1, 10, 1),
    (64, 4, 8, 1, None, 3.0, 60, 2048, 1),
    (64, 4, 8, 1, None, 1.0, -1, 2048, 1),
    (4, 1, 4, 1, 4, 1.0, -1, 12, 1),
    (4, 4, 4, 1, 2, 1.0, -1, 13, 1),
    (4, 3, 4, 1, 2, 1.0, -1, 13, 1),
    (4, 3, 4, 2, 2, 2.0, -1, 13, 1),
    (2, 5, 10, 3, None, 2.5, -1, 7, 1),
    (6, 2, 3, 2, 4, 1.5, -1, 100, 2),
    (3, 4, 6, 1, 8, 1.0, -1, 101, 2),
    (1, 8, 8, 1, None, 3.0, -1, 33, 1),
    (1, 8, 8, 4, 16, 3.0, -1, 33, 1),
    (16, 1, 16, 1, None, 0.3, -1, 50, 4),
    (16, 3, 8, 2, 1, 1.0, 17, 50, 4),
    (5, 7, 7, 1, 7, 3.0, 100, 40, 1),
    (12, 1, 4, 5, 3, 1.0, -1, 31, 2),
    (8, 6, 2, 1, 4, 1.0, 3, 999, 8),
    (2, 2, 2, 1, 3, 4.0, -1, 11, 1),
]


@pytest.fixture(scope="module")
def trainer_arithmetic():
    """Steps by TRL's RepeatSampler and transformers' own arithmetic."""
    torch_data = pytest.importorskip("torch.utils.data")
    utils = pytest.importorskip("trl.trainer.utils")
    transformers = pytest.importorskip("transformers")

    def measure(settings, shape, prompts):
        sampler = utils.RepeatSampler(
            range(prompts),
            mini_repeat_count=settings.num_generations,
            batch_size=shape.completions_per_generation // settings.num_generations,
            repeat_count=settings.num_iterations * shape.steps_per_generation,
        )
        # The data loader's batches are sharded over the processes: one of W batches each.
        per_loader = settings.per_device_train_batch_size * shape.steps_per_generation
        loader = torch_data.DataLoader(range(prompts), batch_size=per_loader, sampler=sampler)
        assert len(loader) % settings.num_processes == 0
        batches = range(len(loader) // settings.num_processes)
        arguments = SimpleNamespace(
            max_steps=settings.max_steps,
            num_train_epochs=settings.num_train_epochs,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
        )
        trainer = SimpleNamespace(
            get_total_train_batch_size=lambda args: 1,
            get_sp_size=lambda: 1,
            num_examples=lambda loader: prompts,
        )
        values = transformers.Trainer.set_initial_training_values(trainer, arguments, batches)
        return list(sampler), len(batches), values[1], values[-1]

    return measure


@pytest.mark.parametrize("case", CASES)
def test_against_trl_and_transformers(case, trainer_arithmetic):
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "num_iterations",
        "steps_per_generation",
        "num_train_epochs",
        "max_steps",
    )
    settings = BatchSettings(**dict(zip(names, case[:7], strict=True)), num_processes=case[8])
    prompts = case[7]
    shape = batch_shape(settings)
    length = run_length(settings, shape, prompts)
    indices, passes, epoch_steps, max_steps = trainer_arithmetic(settings, shape, prompts)

    assert length.steps_per_epoch == epoch_steps
    assert length.total_steps == max_steps
    assert prompts - length.unused_prompts_per_epoch == len(set(indices))
    repeats = settings.num_iterations * shape.steps_per_generation
    assert length.generations_per_epoch * shape.completions_per_generation * repeats == len(indices)

    # Replay the training loop: a generation is made every S * I passes.
    generated, seen, steps = 0, 0, 0
    while steps < max_steps:
        for first in range(0, passes, settings.gradient_accumulation_steps):
            for _ in range(min(settings.gradient_accumulation_steps, passes - first)):
                generated += seen % repeats == 0
                seen += 1
            steps += 1
            if steps == max_steps:
                break
    assert length.total_generations == generated
    per_pass = settings.per_device_train_batch_size * settings.num_processes
    assert length.trained_total == seen * per_pass
    assert length.completions_per_step == generated * shape.completions_per_generation / steps
    assert math.isclose(shape.prompts_per_step, shape.trained_per_step / settings.num_generations)
