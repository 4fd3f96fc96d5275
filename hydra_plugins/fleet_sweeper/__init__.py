"""The sweeper that packs points into fleets."""
