"""What studies train with and no recipe needs: data, probes, interventions and responses."""

from lab.contrib import architecture, mixtures, precision, spike_probes, spike_responses, wortsman  # noqa: F401
