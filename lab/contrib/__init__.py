"""What studies train with and no recipe needs: data, probes, interventions and responses."""

from lab.contrib import data, interventions, probes, responses  # noqa: F401
