"""How many problems a model solves: greedy pass@1 and pass@k of sampled completions."""

from dppo.evaluation.benchmarks import Benchmark, Item, load_benchmark
from dppo.evaluation.estimate import Estimate, over_benchmarks, over_items, pass_at_k
from dppo.evaluation.generate import ModelPolicy, Policy
from dppo.evaluation.records import RecordFile, check_settings
from dppo.evaluation.results import measure, table
from dppo.evaluation.run import Settings, evaluate_benchmark

__all__ = [
    "Benchmark",
    "Estimate",
    "Item",
    "ModelPolicy",
    "Policy",
    "RecordFile",
    "Settings",
    "check_settings",
    "evaluate_benchmark",
    "load_benchmark",
    "measure",
    "over_benchmarks",
    "over_items",
    "pass_at_k",
    "table",
]
