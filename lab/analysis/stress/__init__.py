"""What the crash test and the board share: tests of a recipe, measures of its runs, and changes that may cure it."""
