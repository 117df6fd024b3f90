"""Step sizes: the scale a matrix's shape gives, and a first learning rate from one tuned for Adam."""

from collections.abc import Sequence
from typing import Literal

StepNorm = Literal["spectral", "frobenius"]
StepScale = Literal["shape", "fan_in", "none"]

# SPlus's best learning rate as c · (Adam's · hidden size)^p: fitted to the best ones on text, images and diffusion at
# widths 32 to 256, benchmarks/results/lr_transfer/conversion.csv (least squares: 0.72 and 0.38). It is off by up to 0.8
# octaves; the paper's 2 · Adam's · hidden size (arXiv 2506.07254v2, section 7) by up to 2.6, and diverged at two of the
# twelve.
CONVERSION, CONVERSION_POWER = 0.71, 1 / 3


def step_scale(m: int, n: int, rule: StepScale = "shape") -> float:
    """What multiplies the learning rate for an m×n matrix: by default 2 / (m + n) (arXiv 2506.07254, section 4.3).

    A whitened direction has root-mean-square entries of 1, so the scaled step has a Frobenius norm of
    lr · 2√(mn) / (m + n), which no width changes while the aspect ratio stays. "fan_in" is 1 / n, the other rule of
    the paper's figure 7; "none" leaves learning rates in Adam's range, and their best value to depend on the width.
    """
    return {"shape": 2.0 / (m + n), "fan_in": 1.0 / n, "none": 1.0}[rule]


def elementwise_step(shape: Sequence[int], scale: float, width_power: float) -> float:
    """What multiplies the learning rate for a parameter that is not whitened: ``scale`` / n ** ``width_power``.

    n is the length of a row, the last dimension. For vectors, scalars and empty rows it is ``scale``.
    """
    return scale if len(shape) < 2 else scale / max(shape[-1], 1) ** width_power


def lr_from_adam(adam_lr: float, hidden_size: int) -> float:
    """A first learning rate for :class:`~splus.SPlus` from one that works for Adam.

    ``0.71 · (adam_lr · hidden_size) ** (1/3)``, which is within a factor of 1.75 of the best one in the benchmark's
    sweeps. Adam's rate says little: SPlus's best ones lie between 0.28 and 1.2 at all widths of all three tasks, where
    Adam's lie between 0.001 and 0.06. Try half and twice of it as well.

    Args:
        adam_lr: Adam's learning rate, positive.
        hidden_size: width of the model's residual stream, in features.
    """
    if not adam_lr > 0:
        raise ValueError(f"adam_lr={adam_lr} is given; a learning rate tuned for Adam is positive, such as 1e-3.")
    if hidden_size < 1:
        raise ValueError(f"hidden_size={hidden_size} is given; it is the width of the model, 1 or more.")
    return CONVERSION * (adam_lr * hidden_size) ** CONVERSION_POWER
