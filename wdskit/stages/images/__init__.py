"""Image transforms, and decoding fused with the crop behind it."""
