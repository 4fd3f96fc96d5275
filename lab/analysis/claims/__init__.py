"""Claims of papers, judged by the records."""
