"""Low precision: what fp8, MX and NVFP4 do to the range of learning rates, and where their failures come from."""

FIRST_FIGURES = ("rounding_faults", "spikes_by_loss_scale")
