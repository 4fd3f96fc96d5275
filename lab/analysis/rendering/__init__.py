"""How results look: style, axes, panels and pages."""
