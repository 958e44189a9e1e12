"""Augmentations, one a file. The name of the file is the key in `data.augment`, whose value is the probability.

A file has `augment(image, draws)`: the images that it is drawn for, float32 (R, 3, S, S) from −1 to 1 on any device, to
images of the same shape. One that moves pixels also has `move(landmarks, draws)`, float32 (R, 5, 2) in fractions of the
sides. Both get the same `Draws`. Functions of torchvision take one strength for a whole batch; where the strength
differs from image to image, the equation is written here, and tests compare it with torchvision or OpenCV.
"""

# R images   S side
