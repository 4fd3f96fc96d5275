"""`lab coordcheck`, coordinate checks."""
