"""Batch size: the gradient noise scale, the laws that follow from it, and what it advises."""

from lab.analysis.batch_size.estimates import NoiseScale as NoiseScale
from lab.analysis.batch_size.estimates import exponent as exponent
from lab.analysis.batch_size.estimates import learning_rate_curve as learning_rate_curve
from lab.analysis.batch_size.estimates import noise_scale as noise_scale
from lab.analysis.batch_size.estimates import regimes as regimes
from lab.analysis.batch_size.estimates import steps_curve as steps_curve
