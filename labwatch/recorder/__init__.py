"""Recording a training loop of the user's own: the lab's probes on any module and optimizer of torch."""
