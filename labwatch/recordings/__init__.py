"""What a recorder wrote of a training loop: where a loss spike began, and when a trend reaches a level."""
