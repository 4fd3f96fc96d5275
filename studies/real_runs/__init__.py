"""Public runs of up to half a billion parameters, and what they say of the lab's claims on small ones."""

FIRST_FIGURES = ()
