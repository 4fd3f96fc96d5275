"""Claims of papers: how each is judged on records, the verdict on all of them, and how many seeds decide one."""
