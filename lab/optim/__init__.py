"""From gradients to updates: schedules, links, and the chain they make."""
