"""From which learning rate attention logits run away and the loss fails, and what moves these rates."""

FIRST_FIGURES = ()
