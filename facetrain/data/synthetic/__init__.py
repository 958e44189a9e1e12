"""Synthetic identities: procedurally rendered faces, to train and test without a dataset.

An `Identity` holds the shapes and colors of one face; `CaptureConditions` hold the pose, light, expression and
occlusion of one image. `render` turns both into pixels. `dataset_writer` writes datasets of these images.
"""
