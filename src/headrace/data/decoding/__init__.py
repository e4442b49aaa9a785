"""From the bytes of an image to the pixels of a view: decoding, cropping, resizing."""
