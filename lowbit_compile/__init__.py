"""lowbit_compile: a torch.compile backend that rewrites every linear into low-precision GEMMs under a policy.

model = torch.compile(model, backend="lowbit", options={"policy": "tetrajet_v2"})
"""

from .api import load_state_dict, report, state, step
from .errors import LowbitError, LowbitWarning, PolicyError, RewriteError, StateError, UnsupportedError
from .policy import Policy
from .policy_file import load_policy, preset_names

__version__ = "0.1.0"
__all__ = [
    "LowbitError",
    "LowbitWarning",
    "Policy",
    "PolicyError",
    "RewriteError",
    "StateError",
    "UnsupportedError",
    "load_policy",
    "load_state_dict",
    "preset_names",
    "report",
    "state",
    "step",
]
