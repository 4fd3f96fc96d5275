"""Claims on batch size and gradient noise; importing the package files them."""

import lab.analysis.claims.batch_size.batches
import lab.analysis.claims.batch_size.noise
import lab.analysis.claims.batch_size.ramps  # noqa: F401
