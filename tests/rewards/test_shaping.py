"""Rewards for form."""

import subprocess
import sys

import pytest

from dppo.errors import ConfigurationError
from dppo.rewards import format_reward, overlong_penalty


def test_format():
    texts = [r"\boxed{1} and \boxed{2}", r"\boxed{1} and \boxed{2", r"\boxed{}", "#### 3", ""]
    assert format_reward(texts) == [1, 0, 0, 0, 0]
    assert format_reward([[{"role": "assistant", "content": r"\boxed{1}"}]], answer=["1"]) == [1]


def test_overlong_by_hand():
    """Of 20 tokens the last 5 cost 0.2 each."""
    penalty = overlong_penalty(20, 5)
    lengths = [0, 15, 16, 18, 20, 25]
    found = penalty(completion_ids=[[0] * n for n in lengths], prompts=[""] * 6)
    assert found == pytest.approx([0, 0, -0.2, -0.6, -1, -1])
    assert overlong_penalty(4, 4)(completion_ids=[[0]]) == [-0.25]


@pytest.mark.parametrize("arguments", [(0, 1), (10, 0), (10, 11)])
def test_overlong_refuses(arguments):
    with pytest.raises(ConfigurationError, match="max_length="):
        overlong_penalty(*arguments)


def test_importing_rewards_imports_neither_torch_nor_sympy():
    code = (
        "import sys, dppo.rewards; "
        "sys.exit(len({'torch', 'sympy', 'math_verify'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
