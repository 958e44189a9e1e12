"""Batches of a dataset: sampler, reading processes, loader, copies to the device."""
