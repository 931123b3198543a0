import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from dppo.cli.evaluate import evaluate, summarise, total_rewards  # noqa: E402
from dppo.errors import InvalidInputError  # noqa: E402
from dppo.tasks import (  # noqa: E402
    load_builtin_model,
    load_builtin_tokenizer,
    sorting_dataset,
    sorting_reward,
)


@pytest.fixture(scope="module")
def trainer():
    arguments = SimpleNamespace(
        generation_batch_size=16,
        max_completion_length=20,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        generation_kwargs=None,
        chat_template_kwargs=None,
        reward_weights=None,
    )
    accelerator = SimpleNamespace(
        unwrap_model=lambda model: model,
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
    )
    return SimpleNamespace(
        accelerator=accelerator,
        args=arguments,
        model=load_builtin_model().train(),
        processing_class=load_builtin_tokenizer(),
        state=None,
    )


def _evaluate(trainer, rows, reward=sorting_reward, *, seed=0, advance=lambda done: None):
    return evaluate(trainer, rows, rewards=[reward], seed=seed, advance=advance)


def test_leaves_random_state_and_mode_and_repeats_itself(trainer):
    rows, done = sorting_dataset(24, seed=0, split="test"), []
    state = torch.random.get_rng_state()
    first = _evaluate(trainer, rows, advance=done.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert trainer.model.training
    assert done == [16, 24]
    torch.rand(3)
    assert _evaluate(trainer, rows) == first
    assert (first.count, first.unscored) == (24, 0)
    assert 0 < first.mean < 1
    expected = math.sqrt(first.mean * (1 - first.mean) / 23)  # of a binary reward, ddof 1
    assert first.standard_error == pytest.approx(expected)


def test_rewards_get_columns_completions_and_ids(trainer):
    rows, seen = sorting_dataset(4, seed=0, split="test"), {}

    def spy(prompts, completions, completion_ids, answer, **kwargs):
        seen.update(kwargs, ids=completion_ids, text=completions)
        kwargs["log_metric"]("nothing", 1.0)
        assert prompts == rows["prompt"][:]
        assert answer == rows["answer"][:]
        return [None] * len(prompts)

    result = _evaluate(trainer, rows, spy)
    assert (result.count, result.unscored) == (0, 4)
    assert set(seen) == {"trainer_state", "log_extra", "log_metric", "ids", "text"}
    end = trainer.processing_class.eos_token_id
    for ids, text in zip(seen["ids"], seen["text"], strict=True):
        assert end not in ids[:-1]
        assert trainer.processing_class.decode(ids, skip_special_tokens=True) == text


def test_conversational_and_asynchronous(trainer):
    plain = sorting_dataset(4, seed=0, split="test")
    rows = plain.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})

    async def reward(completions, answer, **kwargs):
        return sorting_reward(completions, answer)

    assert _evaluate(trainer, rows, reward) == _evaluate(trainer, plain)


def test_wrong_number_of_rewards_is_an_error(trainer):
    rows = sorting_dataset(4, seed=0, split="test")
    with pytest.raises(InvalidInputError, match="returned 1 values for 4"):
        _evaluate(trainer, rows, lambda **kwargs: [1.0])


def test_weights_and_missing_scores():
    assert total_rewards([[1.0], [0.0]], [0.7, 0.3]) == [0.7]
    assert total_rewards([[None, math.nan], [0.5, None]], [1.0, 2.0]) == [1.0, None]


def test_mean_and_standard_error():
    # 1, 0, 0, 1: variance (4 x 0.25) / 3, over 4 = 1 / 12
    result = summarise([1.0, 0.0, None, 0.0, 1.0])
    assert (result.mean, result.count, result.unscored) == (0.5, 4, 1)
    assert result.standard_error == pytest.approx(math.sqrt(1 / 12))
    assert math.isnan(summarise([1.0]).standard_error)
