"""What every side of a comparison trains: the task of benchmarks/RESULTS.md."""

BATCH, LENGTH, VOCABULARY, HEAD_WIDTH = 16, 64, 256, 32
RUNS = 8  # of a fleet, and of a vmap
WIDTHS = (32, 64, 128, 256)


def depth(width: int) -> int:
    """Blocks at a width."""
    return 2 if width <= 64 else 4
