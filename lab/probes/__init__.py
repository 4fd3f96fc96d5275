"""What may be overheard of a training step."""
