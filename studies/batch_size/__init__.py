"""Batch size: the gradient noise scale, the laws that follow from it, and advice on batch and learning rate."""

FIRST_FIGURES = ("steps_with_batch", "best_lr_with_batch", "noise_scale_with_loss", "batch_ramps")
