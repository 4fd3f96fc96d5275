"""Measures what the probe noise_scale costs at the default interval, in alternating rounds; prints a table.

    python benchmarks/noise_probe.py [SECONDS [ROUNDS]]

Both sides train the same micro-batches and record the training loss.  SECONDS are those of a side in each round.  The
ratio is taken within each round, so that a machine that slows down slows both sides; the table has its median, least
and largest.
"""

from __future__ import annotations

import statistics
import sys

from sides import Side, ratios

WIDTHS = (32, 64, 128)
MICRO_BATCHES = (2, 8)  # of the 16 sequences of a batch
PROBES = ("probes.names=[train_loss,noise_scale]", "probes.names=[train_loss]")  # with it, without it


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    print("| width | micro-batches | engine | noise_scale adds | least | most |\n|---|---|---|---|---|---|")
    for width in WIDTHS:
        for count in MICRO_BATCHES:
            for engine in ("eager", "compiled"):
                shared = ("precision=bf16", f"engine={engine}", "batch=constant", f"batch.micro_batch={16 // count}")
                with_probe, without = (Side("lab", (*shared, probe)) for probe in PROBES)
                measured = ratios(with_probe, without, width, rounds, seconds)
                added = [statistics.median(measured) - 1, min(measured) - 1, max(measured) - 1]
                print(f"| {width} | {count} | {engine} | {' | '.join(f'{part:+.1%}' for part in added)} |", flush=True)


if __name__ == "__main__":
    main()
