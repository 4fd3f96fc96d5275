"""The report of results folders: its page, tables and findings."""
