"""Image transforms, and decoding fused with the crop that follows."""
