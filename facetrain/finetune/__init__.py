"""Fine-tuning of a model on the user's own photos, with choices that the data and the machine make."""
