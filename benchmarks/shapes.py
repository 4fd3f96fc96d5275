"""The shapes that every side of a comparison trains, as in benchmarks/RESULTS.md."""

BATCH, LENGTH, VOCABULARY, HEAD_WIDTH = 16, 64, 256, 32
WIDTHS = (32, 64, 128, 256)


def depth(width: int) -> int:
    """Return the number of blocks at a width."""
    return 2 if width <= 64 else 4


def runs(width: int) -> int:
    """Return the size of a fleet or vmap; it is small for wide models, so that a round has several steps."""
    return 8 if width <= 128 else 2
