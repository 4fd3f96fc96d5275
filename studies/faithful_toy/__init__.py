"""Which small model fails under which change of a recipe as models of a few hundred million parameters do."""

FIRST_FIGURES = ()
