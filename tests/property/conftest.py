"""Hypothesis, derandomised: the same examples in every run, on every machine."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, database=None)
settings.load_profile("ci")
