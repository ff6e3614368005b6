"""States how far the variants of a training step may differ, and judges what was measured. Imports no TensorFlow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

# How much more than the control float32 may differ: the same steps with the rows of each batch in another order, so
# that sums are rounded otherwise.
TIMES_CONTROL = 3.0
# Below these a control is chance: the spacing of float32; for a loss or a norm, in which differences may cancel, more.
_LEAST_WEIGHTS, _LEAST_OTHERS = 1e-7, 1e-5


# The largest relative difference of losses and of gradients from float64. TF32 and float16 round factors to 11 bits,
# bfloat16 to 8. Each band is more than ten times what recipes gave on a CPU (docs/gpus.md); for TF32, which no CPU has,
# that of float16 holds.
BANDS = {"tf32": 0.03, "mixed_float16": 0.03, "mixed_bfloat16": 0.1}

# Arrays by group, as moving statistics change by much more than what an optimizer trains, and would hide it.
Weights = Mapping[str, Sequence[npt.NDArray[np.float64]]]


@dataclass(frozen=True)
class Trained:
    """Holds what a variant computed in its first steps, as float64."""

    before: Weights  # before the first step
    after: Weights
    losses: Mapping[str, float]  # means over the steps
    gradient_norm: float  # root mean square over the updates; without Adam, that of the weights' change


@dataclass(frozen=True)
class Difference:
    """Holds how far a variant is from another: relative numbers, and the largest that each may be; None: not judged."""

    weights: float
    loss: float
    gradient: float
    most_weights: float | None = None
    most_loss: float | None = None
    most_gradient: float | None = None

    @property
    def problem(self) -> str:
        """Returns what is too far from the other; "" if nothing is."""
        measured = {
            "weights": (self.weights, self.most_weights),
            "losses": (self.loss, self.most_loss),
            "gradients": (self.gradient, self.most_gradient),
        }
        return ", ".join(
            f"{name} differ by {value:.1e}, more than {most:.1e}"
            for name, (value, most) in measured.items()
            if most is not None and not value <= most  # NaN is too far
        )


def difference(variant: Trained, reference: Trained) -> Difference:
    """Returns how far a variant is from another, not judged.

    Weights: the L2 norm of the difference of a group, relative to how far the steps moved it; of all groups the
    largest; a group that did not move, as that of frozen weights, must be equal. Losses: relative to the largest loss
    of the reference. Gradients: of their norms.
    """
    groups = [
        _norm(variant.after[group], after) / max(_norm(after, reference.before[group]), 1e-300)
        for group, after in reference.after.items()
    ]
    scale = max(max(map(abs, reference.losses.values()), default=1.0), 1e-300)
    losses = [abs(variant.losses[name] - value) / scale for name, value in reference.losses.items()]
    gradient = abs(variant.gradient_norm - reference.gradient_norm) / max(reference.gradient_norm, 1e-300)
    return Difference(_largest(groups), _largest(losses), gradient)


def largest(differences: Sequence[Difference]) -> Difference:
    """Returns the largest of several differences, each kind for itself."""
    kinds = ("weights", "loss", "gradient")
    return Difference(*(max(getattr(difference, kind) for difference in differences) for kind in kinds))


def float32_difference(variant: Trained, base: Trained, control: Difference) -> Difference:
    """Returns the difference of two float32 variants, which may be three times the control."""
    return replace(
        difference(variant, base),
        most_weights=TIMES_CONTROL * max(control.weights, _LEAST_WEIGHTS),
        most_loss=TIMES_CONTROL * max(control.loss, _LEAST_OTHERS),
        most_gradient=TIMES_CONTROL * max(control.gradient, _LEAST_OTHERS),
    )


def banded_difference(variant: Trained, reference: Trained, band: float) -> Difference:
    """Returns the difference of a variant with shorter factors from float64, in its band."""
    return replace(difference(variant, reference), most_loss=band, most_gradient=band)


def _norm(weights: Sequence[npt.NDArray[np.float64]], others: Sequence[npt.NDArray[np.float64]]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(a - b))) for a, b in zip(weights, others, strict=True)))


def _largest(values: Sequence[float]) -> float:
    """Returns the largest value, NaN if one is NaN."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)
