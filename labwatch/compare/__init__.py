"""`lab compare` of two logs or more of one recipe."""
