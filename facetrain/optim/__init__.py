"""Learning rates, parameter groups, and the step that all ranks take or skip together."""
