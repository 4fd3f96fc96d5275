"""Laws of size: power laws, limits known within brackets, and the best learning rate as a law of several numbers."""
