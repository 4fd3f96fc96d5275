"""The board: which published change of a recipe cures which failure of training, and what it costs."""
