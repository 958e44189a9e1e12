"""Readers and writers, one file per dataset format."""
