"""Links of an optimizer: clipping, directions, weight decay, learning rates, projections; each a rule over a fleet.

A link reads its numbers by field name out of ``conf/optimizer/NAME.yaml``.  Updates pass through the chain as a
``gradient``, then as a ``direction`` (the rule's own step of about unit size), then as the ``step`` that is subtracted.
"""

import lab.optim.links.adam
import lab.optim.links.clipping
import lab.optim.links.learning_rate
import lab.optim.links.momentum
import lab.optim.links.muon
import lab.optim.links.projections  # noqa: F401  (these six fill the registry)
from lab.optim.links.link import Link as Link
from lab.optim.links.link import Now as Now
from lab.optim.links.link import Tensors as Tensors
