"""The rules of others in the trainer: they do what they say, or refuse."""

from typing import Any

import numpy as np
import pytest
import torch

import dppo
from dppo.errors import ConfigurationError
from dppo.tasks import load_builtin_tokenizer, sorting_dataset
from dppo.trl.peer_prompts import PromptSupply
from dppo.trl.peers import PEERS, PeerConfig, PeerTrainer

from .conftest import OPTIONS, alternating_reward, tiny_model, watched

RARE = {"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}


def prompt_reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Depends on both, and is constant in many groups."""
    return [
        float(sum(map(ord, p)) % 3 == 0 and sum(map(ord, c)) % 3 == 0)
        for p, c in zip(prompts, completions, strict=True)
    ]


def peer_trainer(tmp_path: Any, *, reward: Any = alternating_reward, **overrides: Any) -> Any:
    return PeerTrainer(
        tiny_model(),
        reward,
        PeerConfig(str(tmp_path), **{**OPTIONS, "packing": "bucket", **overrides}),
        sorting_dataset(64, seed=0),
        processing_class=load_builtin_tokenizer(),
    )


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("packing", ["bucket", "auto"])
def test_every_peer_trains(tmp_path, peer, packing, caplog):
    watched(peer_trainer(tmp_path, peer=peer, packing=packing, **RARE))
    assert f"{peer} (" in caplog.text
    assert "BIASED" in caplog.text


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_cppo_averages_over_the_largest(tmp_path, loss_type):
    trainer = peer_trainer(tmp_path, peer="cppo", peer_rate=0.25, loss_type=loss_type, **RARE)
    for decision in watched(trainer).decisions:
        (choice,), size = decision.choices, np.abs(decision.choices[0].advantages)
        count = choice.kept.sum()
        assert count == min(4, choice.live.sum())  # a quarter of 16; those without A never run
        assert size[choice.kept].min() >= size[~choice.kept].max()
        share = np.ones(16) if loss_type == "grpo" else decision.rows.loss_tokens
        chosen = np.argsort(-size.ravel(), kind="stable")[:4]
        expected = share.sum() / share[chosen].sum()
        np.testing.assert_allclose(choice.weight[choice.kept], expected)
        assert sum(choice.dropped.values()) == 16 - count


def test_pods_trains_on_its_own_advantages(tmp_path):
    trainer = peer_trainer(tmp_path, peer="pods", max_steps=1, **RARE)
    output: list[Any] = []
    inner = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (
        output.append(inner(inputs)) or (output[-1])
    )
    (decision,) = watched(trainer).decisions
    choice = decision.choices[0]
    advantages = output[0]["advantages"].reshape(4, 4).numpy()
    np.testing.assert_allclose(advantages, trainer.pruner.advantages_PG, rtol=1e-6)
    for kept, anew in zip(choice.kept, advantages, strict=True):
        if kept.any():  # a best and a worst of two values
            assert sorted(np.sign(anew[kept])) == [-1, 1]


@pytest.mark.parametrize("peer", ["dapo", "greso"])
def test_groups_without_signal_are_rolled_out_again(tmp_path, peer):
    """And what is trained on are the new prompts with their own completions and rewards."""
    trainer = peer_trainer(tmp_path, peer=peer, reward=prompt_reward, max_steps=1, **RARE)
    output: list[Any] = []
    inner = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (
        output.append(inner(inputs)) or (output[-1])
    )
    (decision,) = watched(trainer).decisions
    assert trainer.rejected_tokens > 0
    tokenizer, batch = trainer.processing_class, output[0]
    prompts = tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    texts = tokenizer.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rewards = np.array(prompt_reward(prompts, texts)).reshape(4, 4)
    np.testing.assert_array_equal(rewards, decision.rewards_PG)
    assert (rewards.std(axis=1) > 0).mean() > 0.5  # 10 rollouts leave few without
    expected = dppo.group_advantages(rewards, epsilon=1e-4).values_PG
    np.testing.assert_allclose(batch["advantages"].reshape(4, 4), expected, atol=1e-5)
    assert all(len(set(prompts[g * 4 : g * 4 + 4])) == 1 for g in range(4))


def test_a_supply_takes_prompts_with_their_probability():
    supply = PromptSupply(np.arange(50), lambda prompt: 0.0 if prompt < 25 else 0.5, seed=0)
    drawn = [next(supply) for _ in range(400)]
    assert min(drawn) == 25
    # 25 prompts at 0.5 in each pass: 400 / 12.5 = 32 passes, standard deviation under 2.
    assert 26 <= supply.passes <= 38
    again = PromptSupply(np.arange(50), lambda prompt: 0.0 if prompt < 25 else 0.5, seed=0)
    assert [next(again) for _ in range(400)] == drawn
    with pytest.raises(ConfigurationError, match="every prompt was skipped"):
        next(PromptSupply(np.arange(2), lambda prompt: 0.0, seed=0))


def test_refusals(tmp_path):
    for options, words in (
        ({"peer": "grpo"}, "peer"),
        ({"peer_rate": 1.0}, "peer_rate=1.0"),
        ({"completion_rule": "proportional"}, "completion_rule"),
        ({"prompt_keep": 0.5}, "prompt_keep"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers=2"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            PeerConfig(str(tmp_path), **{**OPTIONS, **options})
    with pytest.raises(ConfigurationError, match="cannot be resumed"):
        peer_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_the_estimator_is_not_biased_by_them(tmp_path):
    """Control of the above: the mean of CPPO's factor is not 1 where there is a gradient."""
    decisions = watched(peer_trainer(tmp_path, peer="cppo", **RARE)).decisions
    live = [c.weight[c.live] for d in decisions for c in d.choices]
    assert all(np.abs(weight - 1).max() > 0.1 for weight in live if weight.size > 8)
    assert torch.isfinite(torch.tensor(np.concatenate(live))).all()
