"""Forecasts from small models: at which larger size or learning rate runs will be unstable."""

from lab.analysis.forecast.report import predict, say

__all__ = ["predict", "say"]
