"""Batch size: the gradient noise scale, the laws that follow from it, and batches that grow."""

FIRST_FIGURES = ("steps_with_batch", "best_lr_with_batch", "noise_scale_with_loss", "batch_ramps")
