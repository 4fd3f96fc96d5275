"""Sweeps of many fleets, sets of runs trained as one: plan, estimate the cost, train as jobs, watch and gather."""
