"""What every side of a comparison trains: the task of benchmarks/RESULTS.md."""

BATCH, LENGTH, VOCABULARY, HEAD_WIDTH = 16, 64, 256, 32
WIDTHS = (32, 64, 128, 256)


def depth(width: int) -> int:
    """Blocks at a width."""
    return 2 if width <= 64 else 4


def runs(width: int) -> int:
    """How many are in a fleet, and under a vmap; of the widest few, for memory and for visits of several steps."""
    return 8 if width <= 128 else 2
