"""What the committed records say of a run of any size, by its numbers, without training."""
