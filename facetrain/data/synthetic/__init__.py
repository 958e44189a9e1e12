"""Synthetic identities: drawn faces, to try and to test the program without a dataset.

A `Identity` has the shapes and colors of one face, a `Photo` the pose, light and camera of one image. `drawing` turns
both into pixels, and `dataset_writer` writes datasets of them.
"""
