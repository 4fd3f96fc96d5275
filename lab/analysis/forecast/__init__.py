"""Forecasts from small models: at which size or learning rate runs will be unstable."""
