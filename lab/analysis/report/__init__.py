"""The report of a results folder: one page, its tables and its findings."""
