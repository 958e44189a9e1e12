"""The margin-softmax head, whose class centres are split over the ranks."""
