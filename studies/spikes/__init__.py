"""Loss spikes: their causes, responses that end them, and the damage that they leave."""

FIRST_FIGURES = (
    "own_spikes",
    "alarms_on_own_spikes",
    "spike_causes",
    "own_spike_remedies",
    "sources",
    "two_held_out_losses",
    "updates_and_descent",
    "responses",
    "repeated_bursts",
    "spike_arms",
    "state_and_data",
    "restarts",
    "loss_scale_over_steps",
)
