"""Face images: decoding, alignment, augmentation."""
