"""SPlus: a stable whitening optimizer for PyTorch (arXiv 2506.07254)."""

from splus.arguments import PAPER
from splus.coordinates import CoordinateCheck, coordinate_check
from splus.groups import param_groups
from splus.optimizer import SPlus
from splus.scaling import lr_from_adam

__all__ = ["PAPER", "CoordinateCheck", "SPlus", "coordinate_check", "lr_from_adam", "param_groups"]
__version__ = "0.1.0"
