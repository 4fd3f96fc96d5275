"""What a recipe may add to the model or to the loss, each by the presence of a config key."""
