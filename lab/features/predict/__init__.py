"""Forecasts from small models: the larger size or learning rate at which runs become unstable."""

from lab.features.predict.answer import predict, say

__all__ = ["predict", "say"]
