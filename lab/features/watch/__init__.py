"""Watch logs: what happened and what to look at next, beside a twin, as text and pages."""
