"""Rendering of results: figure style, axes, panels and HTML pages."""
