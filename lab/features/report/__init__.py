"""`lab report`, the pages of results folders."""
