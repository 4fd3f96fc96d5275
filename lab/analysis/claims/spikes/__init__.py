"""Claims on loss spikes and on what keeps training stable; importing the package files them."""

import lab.analysis.claims.spikes.adam
import lab.analysis.claims.spikes.alarms
import lab.analysis.claims.spikes.architecture
import lab.analysis.claims.spikes.arms
import lab.analysis.claims.spikes.damage
import lab.analysis.claims.spikes.ledgers
import lab.analysis.claims.spikes.positions
import lab.analysis.claims.spikes.precision
import lab.analysis.claims.spikes.recipes
import lab.analysis.claims.spikes.responses
import lab.analysis.claims.spikes.swaps  # noqa: F401
