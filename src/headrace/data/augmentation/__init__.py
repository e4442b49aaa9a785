"""Random changes of training images, on the device or on the host, and the mixing of images and labels."""
