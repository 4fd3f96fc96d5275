"""What a user asks of the lab: a package or a module each, none of which imports another."""
