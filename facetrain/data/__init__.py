"""From a dataset folder to batches on the device."""
