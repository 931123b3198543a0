"""What pruning rules do to recorded rollouts: bias, variance, cost. numpy only.

The methods of others, which are biased, are in `peers`; nothing here is used in training.
"""

from dppo.audit.measure import Measured, measure
from dppo.audit.methods import Method, unbiased_methods
from dppo.audit.peers import biased_methods
from dppo.audit.recording import Recording, load_recording, save_recording
from dppo.audit.redraws import Redraws, measure_redraws

__all__ = [
    "Measured",
    "Method",
    "Recording",
    "Redraws",
    "biased_methods",
    "load_recording",
    "measure",
    "measure_redraws",
    "save_recording",
    "unbiased_methods",
]
