"""Measures what experts cost: a step of a mixture over one of the dense model, in alternating rounds; prints a table.

    python benchmarks/experts.py [SECONDS [ROUNDS]]

Experts have a quarter of the hidden units of the dense MLP, as in the sweeps of the study.
All experts are computed.  The ratio is taken within each round, so that a machine that slows down slows both sides.
"""

from __future__ import annotations

import statistics
import sys

from sides import Side, ratios

WIDTH = 32
SHARED = ("precision=fp32", "engine=eager", "probes=none")
DENSE = ("intervention=[qk_layernorm]",)
MIXTURES = {
    "8 experts": ("intervention=[qk_layernorm,experts]",),
    "8 experts, balance": ("intervention=[qk_layernorm,experts,balance]",),
    "8 experts, balance, router z-loss": ("intervention=[qk_layernorm,experts,balance,router_z]",),
    "8 experts, sigmoids, bias": (
        "intervention=[qk_layernorm,experts,router_bias]",
        *("intervention.experts.router=sigmoid", "intervention.experts.top_k=2"),
    ),
    "32 experts, 4 act, balance": (
        "intervention=[qk_layernorm,experts,balance]",
        *("intervention.experts.number=32", "intervention.experts.top_k=4"),
    ),
}


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    print("| mixture | dense steps that a step takes | least | most |\n|---|---|---|---|")
    for name, words in MIXTURES.items():
        mixture, dense = (Side("lab", (*SHARED, *side)) for side in (words, DENSE))
        measured = ratios(mixture, dense, WIDTH, rounds, seconds)
        numbers = [statistics.median(measured), min(measured), max(measured)]
        print(f"| {name} | {' | '.join(f'{number:.2f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
