"""Guard a recipe: baselines of its curves or its card, whether new ones are worse, and two folders side by side."""
