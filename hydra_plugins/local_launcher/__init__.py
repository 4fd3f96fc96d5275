"""The launcher that gives every job a process of its own on this machine."""
