"""The margin-softmax head, whose class centers are split over the ranks."""
