"""Batch size: the gradient noise scale, the laws that follow from it, and advice on batch and learning rate."""

from lab.studies.batch_size.estimates import NoiseScale as NoiseScale
from lab.studies.batch_size.estimates import exponent as exponent
from lab.studies.batch_size.estimates import learning_rate_curve as learning_rate_curve
from lab.studies.batch_size.estimates import noise_scale as noise_scale
from lab.studies.batch_size.estimates import regimes as regimes
from lab.studies.batch_size.estimates import steps_curve as steps_curve

FIRST_FIGURES = ("steps_with_batch", "best_lr_with_batch", "noise_scale_with_loss", "batch_ramps")
