"""Distributed training: start of the ranks, process group, collectives and detection of lost ranks."""
